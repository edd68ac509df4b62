"""The emulator's side of its control socket: one JSON object a line in, one out (`messages`).

What is no request is answered {"ok": false, "error": "..."}, and the emulator goes on; end of file ends it.
"""

import json
import socket
from collections.abc import Callable, Mapping
from time import monotonic_ns, time
from typing import Any

import msgspec

from testbed.links.emulator import messages
from testbed.links.emulator.lane import Lane
from testbed.links.emulator.load import Load
from testbed.model.impairment import Impairment


class Control:
    def __init__(
        self, sock: socket.socket, lanes: dict[str, Lane], load: Load, health: Callable[[], messages.Health]
    ) -> None:
        self._socket = sock
        self._lanes = lanes
        self._load = load
        self._health = health
        self._buffer = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def answer(self) -> bool:
        """Serve what has arrived; False at end of file."""
        try:
            received = self._socket.recv(65536)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not received:
            return False
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        if len(self._buffer) > messages.MAX_LINE:
            self._buffer = b""
            return self._send({"id": None, "ok": False, "error": f"a line is longer than {messages.MAX_LINE} bytes"})
        return all(self._send(self._serve(line)) for line in lines)

    def _send(self, message: dict[str, Any]) -> bool:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def _serve(self, line: bytes) -> dict[str, Any]:
        identity = None
        try:
            request = json.loads(line)
            identity = request.get("id") if isinstance(request, dict) else None
            answer = self._handle(msgspec.convert(request, messages.AnyRequest))
            return {"id": identity, "ok": True, **answer}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return {"id": identity, "ok": False, "error": f"{type(error).__name__}: {error}"}

    def _handle(self, request: messages.AnyRequest) -> Mapping[str, Any]:
        now = monotonic_ns()
        match request:
            case messages.Apply():
                impairment = Impairment.from_dict(request.impairment)
                self._lanes[request.direction].configure(impairment, request.line_limit_bytes, now)
            case messages.Applied():
                return {name: lane.applied() for name, lane in self._lanes.items()}
            case messages.Counters():
                return {name: lane.counters() for name, lane in self._lanes.items()}
            case messages.Lateness():
                return {name: lane.late(monotonic_ns(), time()) for name, lane in self._lanes.items()}
            case messages.GetHealth():
                return self._health()
            case messages.Measure():
                self._load.measure(request.on, now)
                for lane in self._lanes.values():
                    lane.measure(request.on, now, time())
            case messages.Forget():
                self._load.forget()
                for lane in self._lanes.values():
                    lane.forget(now, time())
        return {}
