"""The emulator answers what is no request with one error, and serves the next."""

import json
import socket
from typing import Any

import pytest

from testbed.links.emulator.control import Control
from testbed.links.emulator.lane import Lane
from testbed.links.emulator.load import Load
from testbed.links.emulator.messages import MAX_LINE
from testbed.model.impairment import Impairment

HEALTH: Any = {"pid": 1, "busy_last": 0.0, "busy_max": 0.0}
APPLY = {"op": "apply", "id": 1, "direction": "forward", "impairment": {}, "line_limit_bytes": 1000}


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"{x", "Expecting property name"),
        (b"\xff\xfe", "JSONDecodeError"),
        (b"[" * 100_000, "RecursionError"),
        (b"[1]", "Expected `object`, got `array`"),
        (b'{"id": 1, "op": "dance"}', "Invalid value 'dance'"),
        (b'{"id": 1}', "missing required field `op`"),
        (b'{"id": 1, "op": "measure", "on": 1}', "Expected `bool`, got `int` - at `$.on`"),
        (b'{"id": 1, "op": "health", "of": "me"}', "unknown field `of`"),
        (json.dumps({**APPLY, "direction": "up"}).encode(), "Invalid enum value 'up'"),
        (json.dumps({**APPLY, "line_limit_bytes": -1}).encode(), "Expected `int` >= 0 - at `$.line_limit_bytes`"),
        (json.dumps({**APPLY, "impairment": {"delay": 1}}).encode(), "unexpected keyword argument"),
    ],
)
def test_what_is_no_request_is_one_error(line: bytes, error: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        theirs.setblocking(False)
        lanes = {way: Lane(Impairment(), 1 << 20, lambda _: True, 0) for way in ("forward", "backward")}
        control = Control(theirs, lanes, Load(0), lambda: HEALTH)
        for sent, expected in ((line, error), (b'{"id": 2, "op": "health"}', None)):
            ours.sendall(sent + b"\n")
            answers = b""
            while not answers.endswith(b"\n"):
                assert control.answer()
                ours.setblocking(False)
                try:
                    answers += ours.recv(1 << 20)
                except BlockingIOError:
                    continue
            answer = json.loads(answers)
            if expected is None:
                assert answer == {"id": 2, "ok": True, **HEALTH}
            else:
                assert answer["ok"] is False
                assert expected in answer["error"]


def test_a_line_without_end_is_one_error() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        control = Control(theirs, {}, Load(0), lambda: HEALTH)
        answer = b""
        ours.setblocking(False)
        for _ in range(MAX_LINE // 4096 + 64):
            ours.sendall(b"x" * 4096)
            assert control.answer()
            try:
                answer = ours.recv(4096)
                break
            except BlockingIOError:
                continue
        assert "longer than" in json.loads(answer)["error"]
