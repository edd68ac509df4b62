"""Serving events are heard over a real socket, from any number of senders, and rubbish harms nobody."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.congestion.schedule import ServingEvent
from testbed.congestion.triggers import TriggerSocket, parse
from tests.conftest import ROOT
from workers.events import Teller


@pytest.fixture
def events(tmp_path: Path) -> Iterator[TriggerSocket]:
    events = TriggerSocket(tmp_path / "events.sock")
    yield events
    events.close()


def test_what_is_told_is_heard_at_the_senders_stamp(events: TriggerSocket, tmp_path: Path) -> None:
    teller = Teller(str(tmp_path / "events.sock"))
    before = time.monotonic_ns()
    assert teller.tell("kv-transfer", request="cmpl-1", fraction=0.61)
    assert teller.tell("handoff")
    after = time.monotonic_ns()
    time.sleep(0.02)
    (first, at), (second, _) = events.listen(time.monotonic_ns())
    assert (first, second) == (ServingEvent("kv-transfer", 0.61, "cmpl-1"), ServingEvent("handoff"))
    assert before <= at <= after
    teller.close()


def test_the_sender_needs_nothing_of_this_project(events: TriggerSocket, tmp_path: Path) -> None:
    script = (ROOT / "workers/events.py").read_text() + "\nassert Teller().tell('handoff', request='r')\n"
    environment = {"PDDBED_EVENTS": str(tmp_path / "events.sock")}
    subprocess.run([sys.executable, "-I", "-S", "-c", script], env=environment, cwd=tmp_path, check=True)
    assert [told for told, _ in events.listen(time.monotonic_ns())] == [ServingEvent("handoff", 1.0, "r")]


def test_telling_never_blocks_and_never_fails(tmp_path: Path) -> None:
    assert not Teller(str(tmp_path / "nobody.sock")).tell("handoff")
    assert not Teller("").tell("handoff")
    events = TriggerSocket(tmp_path / "events.sock")
    teller = Teller(str(tmp_path / "events.sock"))
    assert not all(teller.tell("kv-transfer", fraction=0.5) for _ in range(100_000)), "more than is listened to"
    assert events.listen(time.monotonic_ns())
    events.close()
    assert not teller.tell("handoff")
    assert not (tmp_path / "events.sock").exists()


def test_rubbish_is_counted_and_ignored(events: TriggerSocket, tmp_path: Path) -> None:
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    rubbish = [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"nonsense",
        b'{"event": 1}',
        b'{"event": "x", "fraction": 1.5}',
        b'{"event": "x", "fraction": NaN}',
        b'{"event": "x", "fraction": true}',
        b'{"event": "x", "request_id": ["r"]}',
        b'{"event": "x", "monotonic_ns": "now"}',
        b'{"event": "' + b"x" * 300 + b'"}',
        b'{"event": "x"}' + b" " * 5000,
        b"[" * 4000,
    ]
    for data in rubbish:
        sender.sendto(data, str(tmp_path / "events.sock"))
        assert events.listen(time.monotonic_ns()) == []
    sender.sendto(json.dumps({"event": "handoff"}).encode(), str(tmp_path / "events.sock"))
    assert [told for told, _ in events.listen(time.monotonic_ns())] == [ServingEvent("handoff")]
    assert (events.heard, events.refused) == (1, len(rubbish))


@given(st.binary(max_size=200) | st.text(max_size=50).map(str.encode))
def test_no_datagram_breaks_the_parser(data: bytes) -> None:
    try:
        told, _ = parse(data)
    except ValueError:
        return
    assert 0 <= told.fraction <= 1


def test_a_stamp_of_another_clock_is_not_believed(events: TriggerSocket, tmp_path: Path) -> None:
    now = time.monotonic_ns()
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    for stamp in (now + 10**12, now - 10**12, -5):
        sender.sendto(json.dumps({"event": "x", "monotonic_ns": stamp}).encode(), str(tmp_path / "events.sock"))
    assert [at for _, at in events.listen(now)] == [now] * 3
