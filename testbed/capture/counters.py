"""The workers' own byte counters: having every worker note them now, and reading the notes.

A worker appends a line to `bytes-HOST.jsonl` in its records directory on SIGUSR1 and when it ends
(workers/bytelog.py). Counters are cumulative since the worker started.
"""

import json
import os
import signal
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.lab.control import Reply

if TYPE_CHECKING:
    from testbed.lab.operations import RunningLab

_PATIENCE_S = 3.0
_POLL_S = 0.002
_TOGETHER_NS = 100_000_000  # notes of two workers nearer than this belong to one reading
SLACK_NS = 50_000_000  # what may lie between a count and its packets on a busy machine
_AT_END_NS = 10_000_000_000  # how far from the first or last reading a better one is looked for
Key = tuple[str, str, str]  # peer, "sent" or "received", class
Window = tuple[int, int]  # Unix nanoseconds, first and last


@dataclass(frozen=True, slots=True)
class Note:
    """A worker's counters at one moment (Unix nanoseconds)."""

    host: str
    pid: int
    time_ns: int
    bytes: dict[Key, int]

    def with_peer(self, peer: str, way: str) -> dict[str, int]:
        """Bytes exchanged with one peer, by class; classes without bytes left out."""
        return {name: size for (other, side, name), size in self.bytes.items() if (other, side) == (peer, way) and size}


class BadCounters(Exception):
    """The notes cannot be used; the message says which line and why."""


# -- in the lab --------------------------------------------------------------------------------------------------


def count_bytes(lab: "RunningLab", _request: dict[str, Any]) -> Reply:
    """Have every worker note its counters now.

    Returns the hosts that did, those that did not in time, and whether the notes are `level`: everything that was
    sent has been received, so nothing was on its way.
    """
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
            break
        time.sleep(_POLL_S)
    noted = {host: _last_note(*place) for host, place in asked.items() if host not in silent}
    level = not silent and all(
        is_level(sender, receiver) for sender in noted.values() for receiver in noted.values() if sender is not receiver
    )
    return {"counted": sorted(noted), "silent": silent, "level": level}, []


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _last_note(file: Path, before: int) -> Note:
    """The latest of the lines after byte `before`."""
    with file.open("rb") as stream:
        stream.seek(before)
        return _note(stream.read().splitlines()[-1])


# -- reading -----------------------------------------------------------------------------------------------------


def read_notes(directory: Path) -> dict[str, list[Note]]:
    """Every worker's notes in a records directory, by host, in their order. Raises BadCounters."""
    return {
        file.name[len("bytes-") : -len(".jsonl")]: list(_notes(file))
        for file in sorted(directory.glob("bytes-*.jsonl"))
    }


def _notes(file: Path) -> Iterator[Note]:
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            yield _note(line)
        except (ValueError, KeyError, TypeError) as error:
            raise BadCounters(f"{file}:{number} is not a line of byte counters ({error!r})") from None


def _note(line: bytes) -> Note:
    row = json.loads(line)
    counts = {(peer, way, traffic): int(size) for peer, way, traffic, size, _ in row["counts"]}
    return Note(str(row["host"]), int(row["pid"]), int(row["time_ns"]), counts)


def is_level(sender: Note, receiver: Note) -> bool:
    """Whether the receiver had counted all that the sender had: nothing was on its way between them."""
    return sender.with_peer(receiver.host, "sent") == receiver.with_peer(sender.host, "received")


@dataclass(frozen=True, slots=True)
class PairCount:
    """What two workers counted of the traffic from one to the other, each between two of its own notes.

    `begins_level` and `ends_level`: nothing was on its way at that moment, so packets and counts can be told apart
    there to the byte. Otherwise frames that crossed at that moment may be on either side.
    """

    sent_within: Window
    received_within: Window
    sent: dict[str, int]  # by class
    received: dict[str, int]
    begins_level: bool
    ends_level: bool


def count_pair(
    senders: Sequence[Note], receivers: Sequence[Note], within: Window, before_ns: int = 0, after_ns: int = 0
) -> PairCount | None:
    """From the notes of a sender and of a receiver that lie within a capture; None with less than two of either.

    Chooses the first and the last of each, or a level reading near them. What a receiver counts at first left before
    the capture began, and what a sender counts last passes after it has ended (`before_ns` and `after_ns`: the way
    to the point of capture and on): such notes serve only where nothing was on its way. Raises BadCounters when a
    worker started anew.
    """
    sent, received = _inside(senders, within), _inside(receivers, within)
    level = [pair for pair in _readings(sent, received) if is_level(*pair)]
    begin = sent[:1], [note for note in received if note.time_ns >= within[0] + after_ns + SLACK_NS][:1]
    end = [note for note in sent if note.time_ns <= within[1] - before_ns][-1:], received[-1:]
    begins_level = bool(level) and level[0][0].time_ns - sent[0].time_ns < _AT_END_NS and level[0][0] is not sent[-1]
    if begins_level:
        begin = [level[0][0]], [level[0][1]]
    ends_level = bool(level) and sent[-1].time_ns - level[-1][0].time_ns < _AT_END_NS and [level[-1][0]] != begin[0]
    if ends_level:
        end = [level[-1][0]], [level[-1][1]]
    if not all((*begin, *end)) or any(b[0].time_ns >= e[0].time_ns for b, e in zip(begin, end, strict=True)):
        return None
    (first_sent,), (first_received,) = begin
    (last_sent,), (last_received,) = end
    sender, receiver = first_sent.host, first_received.host
    return PairCount(
        (first_sent.time_ns, last_sent.time_ns),
        (first_received.time_ns, last_received.time_ns),
        _difference(first_sent.with_peer(receiver, "sent"), last_sent.with_peer(receiver, "sent")),
        _difference(first_received.with_peer(sender, "received"), last_received.with_peer(sender, "received")),
        begins_level,
        ends_level,
    )


def _inside(notes: Sequence[Note], within: Window) -> list[Note]:
    inside = [note for note in notes if within[0] <= note.time_ns <= within[1]]
    for before, after in pairwise(inside):
        if before.pid != after.pid or any(after.bytes.get(key, 0) < size for key, size in before.bytes.items()):
            raise BadCounters(f"{before.host} started anew during the capture: its counters cannot be compared")
    return inside


def _readings(sent: Sequence[Note], received: Sequence[Note]) -> Iterator[tuple[Note, Note]]:
    """Notes of the two that were taken together."""
    times = [note.time_ns for note in received]
    for note in sent:
        at = bisect_left(times, note.time_ns)
        nearest = min(received[max(0, at - 1) : at + 1], key=lambda other: abs(other.time_ns - note.time_ns))
        if abs(nearest.time_ns - note.time_ns) < _TOGETHER_NS:
            yield note, nearest


def _difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: size - before.get(name, 0) for name, size in after.items()}
