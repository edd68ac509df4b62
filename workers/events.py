"""Telling a lab that something happened, out of band: for timelines. Uses the standard library only.

One datagram to a Unix socket, whose path is in PDDBED_EVENTS; docs/congestion.md has its form for other languages. It
never blocks and never fails: where no timeline listens, nothing is sent. Count at the receiver: "60 % of a KV transfer
has crossed" is for the instance to say that has received it.

    teller = Teller()
    teller.tell("kv-transfer", request="cmpl-1", fraction=received / total)
"""

import json
import os
import socket
import time


class Teller:
    """Sends from any thread. `path` is the lab's socket; by default the one that the environment names."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path or os.environ.get("PDDBED_EVENTS", "")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def tell(self, event: str, *, request: str = "", fraction: float = 1.0) -> bool:
        """Say that `event` has come as far as `fraction` (0 to 1); False where nobody listens."""
        if not self._path:
            return False
        message = {"event": event, "request_id": request, "fraction": fraction, "monotonic_ns": time.monotonic_ns()}
        try:
            self._socket.sendto(json.dumps(message).encode(), self._path)
        except OSError:  # nobody listens, or more is told than is listened to
            return False
        return True

    def close(self) -> None:
        self._socket.close()
