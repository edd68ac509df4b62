"""The workers' own byte counters: having every worker note them now, and reading the notes.

A worker appends a line to `bytes-HOST.jsonl` in its records directory on SIGUSR1 and when it ends
(workers/bytelog.py). Counters are cumulative since the worker started.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.lab.control import Reply

if TYPE_CHECKING:
    from testbed.lab.operations import RunningLab

_PATIENCE_S = 3.0
_POLL_S = 0.002
Key = tuple[str, str, str]  # peer, "sent" or "received", class


def count_bytes(lab: "RunningLab", _request: dict[str, Any]) -> Reply:
    """Have every worker note its counters now; returns the hosts that did, and those that did not in time."""
    asked: dict[str, tuple[Path, int]] = {}
    for host, process in list(lab.processes.by_host.items()):
        file = lab.record.results / f"bytes-{host}.jsonl"
        # before it is ready a worker has no handler, and the signal would end it
        if process.host.role and process.state == "ready" and process.pid:
            asked[host] = (file, _size(file))
            os.kill(process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        silent = [host for host, (file, before) in asked.items() if _size(file) <= before]
        if not silent or time.monotonic() > deadline:
            return {"counted": sorted(set(asked) - set(silent)), "silent": silent}, []
        time.sleep(_POLL_S)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


@dataclass(frozen=True, slots=True)
class Note:
    """A worker's counters at one moment (Unix nanoseconds)."""

    host: str
    pid: int
    time_ns: int
    bytes: dict[Key, int]


class BadCounters(Exception):
    """The notes cannot be used; the message says which line and why."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What one worker counted between two of its notes."""

    host: str
    begin_ns: int
    end_ns: int
    bytes: dict[Key, int]


def read_notes(directory: Path) -> dict[str, list[Note]]:
    """Every worker's notes in a records directory, by host, in their order. Raises BadCounters."""
    return {
        file.name[len("bytes-") : -len(".jsonl")]: list(_notes(file))
        for file in sorted(directory.glob("bytes-*.jsonl"))
    }


def _notes(file: Path) -> Iterator[Note]:
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            counts = {(peer, way, traffic): int(size) for peer, way, traffic, size, _ in row["counts"]}
            yield Note(str(row["host"]), int(row["pid"]), int(row["time_ns"]), counts)
        except (ValueError, KeyError, TypeError) as error:
            raise BadCounters(f"{file}:{number} is not a line of byte counters ({error!r})") from None


def between(notes: list[Note], begin_ns: int, end_ns: int) -> Counted | None:
    """What was counted between the first and the last note within a time; None with less than two.

    Raises BadCounters when the worker started anew in between.
    """
    inside = [note for note in notes if begin_ns <= note.time_ns <= end_ns]
    if len(inside) < 2:
        return None
    first, last = inside[0], inside[-1]
    if first.pid != last.pid or any(last.bytes.get(key, 0) < size for key, size in first.bytes.items()):
        raise BadCounters(f"{first.host} started anew during the capture: its counters cannot be compared")
    counted = {key: size - first.bytes.get(key, 0) for key, size in last.bytes.items()}
    return Counted(first.host, first.time_ns, last.time_ns, counted)
