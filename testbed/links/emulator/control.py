"""The relay's side of its control socket: one JSON object a line in, one out. Owns the vocabulary.

    {"op": "apply", "direction": "forward", "impairment": {...}, "line_limit_bytes": N}  -> {"ok": true}
    {"op": "applied" | "counters" | "lateness" | "health" | "forget"}                   -> {"ok": true, ...}
    {"op": "measure", "on": true}                                                       -> {"ok": true}
Errors answer {"ok": false, "error": "..."}; every answer repeats the request's "id"; end of file ends the relay.
"""

import json
import socket
from collections.abc import Callable
from time import monotonic_ns, time
from typing import Any

from testbed.links.emulator.lane import Lane
from testbed.links.emulator.load import Load
from testbed.model.impairment import Impairment


class Control:
    def __init__(
        self, sock: socket.socket, lanes: dict[str, Lane], load: Load, health: Callable[[], dict[str, Any]]
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
            identity = request.get("id")
            return {"id": identity, "ok": True, **self._handle(request)}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return {"id": identity, "ok": False, "error": f"{type(error).__name__}: {error}"}

    def _handle(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["op"]:
            case "apply":
                lane = self._lanes[request["direction"]]
                impairment = Impairment.from_dict(request["impairment"])
                lane.configure(impairment, request["line_limit_bytes"], monotonic_ns())
                return {}
            case "applied":
                return {name: lane.applied() for name, lane in self._lanes.items()}
            case "counters":
                return {name: lane.counters() for name, lane in self._lanes.items()}
            case "lateness":
                return {name: lane.late(monotonic_ns(), time()) for name, lane in self._lanes.items()}
            case "measure":
                now = monotonic_ns()
                self._load.measure(request["on"], now)
                for lane in self._lanes.values():
                    lane.measure(request["on"], now, time())
                return {}
            case "forget":
                now = monotonic_ns()
                self._load.forget()
                for lane in self._lanes.values():
                    lane.forget(now, time())
                return {}
            case "health":
                return self._health()
        raise ValueError(f"unknown op {request['op']!r}")
