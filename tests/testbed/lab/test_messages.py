"""A lab's replies reach their callers, and `--json`, byte for byte: no key is lost, moved or of another type."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from testbed.lab import control, messages
from testbed.lab.record import Record, find_record
from tests.conftest import Lab

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("leaves_nothing")]

FILE = """
datacenters:
  main: {subnet: 10.1.0.0/24, hosts: {a: {command: sleep 600}, plain: {}, ends: {command: "false"}}}
  remote: {subnet: 10.2.0.0/24, hosts: {b: {}}}
wan: [{name: w0, between: [main, remote], delay: 5ms, rate: 50mbit, jitter: {std: 1ms}, loss: 1%}]
"""


def raw(record: Record, request: Any) -> Any:
    """The reply as it is on the wire."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(120)
        connection.connect(str(record.control_socket))
        control._send(connection, request, [])
        return json.loads(control._receive(connection)[0])


def test_a_reply_is_the_same_on_the_wire_and_in_the_callers_hands(
    raise_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    file = tmp_path / "messages.yaml"
    file.write_text(FILE)
    lab = raise_lab(file, "messages")
    record = find_record("messages")
    events: Any = {
        "events": [
            {"number": 0, "outage": {"duration_ns": 60 * 10**9}, "targets": [["w0", "forward"]], "at_ns": 0,
             "trigger": None, "every_ns": 0, "times": 1},
            {"number": 1, "outage": {"duration_ns": 10**9}, "targets": [["w0", "backward"]], "at_ns": 600 * 10**9,
             "trigger": None, "every_ns": 0, "times": 1},
            {"number": 2, "outage": {"duration_ns": 10**9}, "targets": [["w0", "backward"]], "at_ns": None,
             "trigger": {"event": "kv-transfer", "fraction": 0.5, "request": "any"}, "every_ns": 0, "times": 1},
        ],
        "seed": 0,
        "source": "test",
    }  # fmt: skip
    for request in (
        messages.Verify(quick=False),
        messages.WanSet("w0", "forward", {"delay": "7ms"}),
        messages.WanPlay(events),
        messages.WanShow(),
        messages.WanPlaying(),
        messages.WanStop(),
        messages.WanChanges(0),
        messages.Status(),
        messages.Faithful(),
        messages.CountBytes(),
        messages.FindEndpoints("w0"),
        messages.Enter("a"),
        messages.Capture("w0"),
        messages.WanReset(),
    ):
        said = raw(record, request)
        assert "error" not in said, f"{request}: {said}"
        typed = control._reply(request, json.dumps(said).encode())
        assert json.dumps(msgspec.to_builtins(typed)) == json.dumps(said), request
    assert list(lab.status()) == list(messages.LabStatus.__annotations__)
