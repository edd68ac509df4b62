"""The control socket takes rubbish, crowds and silence, and keeps answering. A real server, in this process."""

import json
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from testbed.lab import control
from testbed.lab.control import MAX_MESSAGE, Answered, ControlServer, ask_lab
from testbed.lab.messages import AnyRequest, Enter, Entry
from testbed.lab.record import LabError, Record


def handle(request: AnyRequest) -> Answered:
    assert isinstance(request, Enter), "something else than a host to enter"
    return Entry((), {"echo": request.host}), []


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """A record whose socket is served. The server's thread is a daemon and stays until this process ends."""
    record = Record(tmp_path)
    ControlServer(record.control_socket, handle)
    return record


def connect(record: Record) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(str(record.control_socket))
    connection.settimeout(10)
    return connection


def message(value: Any) -> bytes:
    data = json.dumps(value).encode()
    return struct.pack("!I", len(data)) + data


def still_answers(record: Record) -> bool:
    return ask_lab(record, Enter("hello")).environment == {"echo": "hello"}


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


RUBBISH = {
    "nothing": b"",
    "half a length": b"\0\0",
    "half a message": struct.pack("!I", 10) + b"abc",
}

NO_REQUESTS = {
    "a huge length": (struct.pack("!I", MAX_MESSAGE + 1) + b"x", "a message of 16777217 bytes is refused"),
    "another protocol": (b"GET / HTTP/1.1\r\n\r\n", "bytes is refused"),
    "no text": (struct.pack("!I", 3) + b"\xff\xfe{", "no request that the lab knows"),
    "no JSON": (struct.pack("!I", 3) + b"{x}", "no request that the lab knows: Expecting property name"),
    "brackets without end": (struct.pack("!I", 100_000) + b"[" * 100_000, "no request that the lab knows"),
    "null": (message(None), "Expected `object`, got `null`"),
    "a list": (message([1]), "Expected `object`, got `array`"),
    "an operation that is not known": (message({"op": "dance"}), "Invalid value 'dance'"),
    "no operation": (message({"host": "p0"}), "missing required field `op`"),
    "a field that is missing": (message({"op": "enter"}), "missing required field `host`"),
    "a field that is not known": (message({"op": "enter", "host": "p0", "as": "root"}), "unknown field `as`"),
    "another type": (message({"op": "verify", "quick": "yes"}), "Expected `bool`, got `str` - at `$.quick`"),
    "below its bounds": (message({"op": "wan-changes", "since": -1}), "Expected `int` >= 0 - at `$.since`"),
    "a name beyond its length": (message({"op": "enter", "host": "x" * 257}), "length <= 256 - at `$.host`"),
    "a direction that is none": (
        message({"op": "wan-set", "link": "wan0", "direction": "up", "values": {}}),
        "Invalid enum value 'up' - at `$.direction`",
    ),
    "a request that fails": (message({"op": "status"}), "something else than a host to enter"),
}


@pytest.mark.parametrize("name", NO_REQUESTS)
def test_what_is_no_request_is_answered_with_one_error(record: Record, name: str) -> None:
    sent, error = NO_REQUESTS[name]
    with connect(record) as connection:
        connection.sendall(sent)
        (length,) = struct.unpack("!I", connection.recv(4, socket.MSG_WAITALL))
        answer = json.loads(connection.recv(length, socket.MSG_WAITALL))
    assert answer.keys() == {"error"}
    assert error in answer["error"]
    assert still_answers(record)


def test_an_answer_of_another_version_is_one_error(record: Record) -> None:
    with pytest.raises(LabError, match="of another pddbed version: Object missing required field"):
        control._reply(Enter("p0"), b'{"environment": {}}')
    with pytest.raises(LabError, match="of another pddbed version"):
        control._reply(Enter("p0"), b"[" * 100_000)


@pytest.mark.parametrize("name", RUBBISH)
def test_rubbish_is_dropped_without_a_word_in_the_log(
    record: Record, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with connect(record) as connection:
        connection.sendall(RUBBISH[name])
        connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            assert connection.recv(100) == b""
    assert still_answers(record)
    assert not raised


@pytest.mark.parametrize("content", [message({"op": "enter", "host": "x"}), b"", struct.pack("!I", 5) + b"abc"])
def test_descriptors_that_nobody_asked_for_are_closed(record: Record, content: bytes) -> None:
    assert still_answers(record)
    before = open_descriptors()
    for _ in range(20):
        with connect(record) as connection:
            socket.send_fds(connection, [content or b"\0"], [0, 0, 0, 0])
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(100):
                pass
    assert open_descriptors() <= before


def test_a_crowd_of_silent_clients_keeps_nobody_from_an_answer(record: Record) -> None:
    crowd = [connect(record) for _ in range(300)]
    try:
        assert still_answers(record)
    finally:
        for connection in crowd:
            connection.close()


def test_when_descriptors_run_out_clients_wait_until_there_are_some_again(record: Record) -> None:
    """Run in a process of its own: the limit is the process's."""
    script = f"""
import os, resource, socket, sys, threading, time
from pathlib import Path
from testbed.lab.control import ControlServer, ask_lab
from testbed.lab.messages import Down, Nothing
from testbed.lab.record import Record
record = Record(Path({str(record.directory)!r}))
record.control_socket.unlink()
ControlServer(record.control_socket, lambda request: (Nothing(), []))
clients = []
for _ in range(3):
    client = socket.socket(socket.AF_UNIX); clients.append(client)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), 4096))
for client in clients:
    client.connect(str(record.control_socket))
time.sleep(0.5)
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
print(ask_lab(record, Down()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert done.stdout == "Nothing()\n", done.stderr
