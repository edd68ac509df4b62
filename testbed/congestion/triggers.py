"""The lab's socket for serving events: a Unix datagram socket, one JSON object a datagram.

Owns the form of a message and what is refused of it. Rubbish is counted and ignored: whoever tells is busy serving.
"""

import json
import math
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from testbed.congestion.schedule import ServingEvent

MAX_MESSAGE = 4096
OLDEST_NS = 60_000_000_000  # a stamp that lies further back is of another clock
QUEUE_LENGTH = 1024  # messages that wait for the player
_MAX_TEXT = 256


def parse(data: bytes) -> tuple[ServingEvent, int | None]:
    """The event in a message, and the sender's CLOCK_MONOTONIC stamp where there is one. Raises ValueError."""
    if len(data) > MAX_MESSAGE:
        raise ValueError(f"a message of more than {MAX_MESSAGE} bytes")
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("a message is a JSON object")
    event, request = message.get("event"), message.get("request_id", "")
    for name, text in (("event", event), ("request_id", request)):
        if not isinstance(text, str) or len(text) > _MAX_TEXT:
            raise ValueError(f"{name} is text of at most {_MAX_TEXT} characters")
    fraction, stamp = message.get("fraction", 1.0), message.get("monotonic_ns")
    if not _is_number(fraction) or not 0 <= fraction <= 1:
        raise ValueError("fraction is a number from 0 to 1")
    if stamp is not None and (not isinstance(stamp, int) or isinstance(stamp, bool)):
        raise ValueError("monotonic_ns is a whole number")
    return ServingEvent(str(event), float(fraction), request), stamp


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def lengthen_datagram_queues(setting: Path = Path("/proc/sys/net/unix/max_dgram_qlen")) -> None:
    """Lengthen the queues of sockets made from now on in this network namespace, the lab's: the default is 10."""
    with suppress(OSError):  # a kernel without it: what is told beyond the queue is lost
        setting.write_text(str(QUEUE_LENGTH))


class TriggerSocket:
    """Listens at a path until it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.heard = 0
        self.refused = 0
        self.refused_last = ""
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def listen(self, now_ns: int, most: int = 256) -> list[tuple[ServingEvent, int]]:
        """The events told since the last call, with their times: the sender's stamp where that can be, else now."""
        told = []
        for _ in range(most):
            try:
                data = self._socket.recv(MAX_MESSAGE + 1)
            except BlockingIOError:
                break
            try:
                message, stamp = parse(data)
            except (ValueError, RecursionError) as error:
                self.refused += 1
                self.refused_last = str(error)
                continue
            self.heard += 1
            plausible = stamp is not None and 0 <= now_ns - stamp <= OLDEST_NS
            told.append((message, stamp if plausible and stamp is not None else now_ns))
        return told

    def close(self) -> None:
        self._socket.close()
        with suppress(OSError):
            self._path.unlink()
