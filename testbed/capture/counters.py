"""The workers' own byte counters: every worker notes them on demand, and an audit reads the notes.

A worker appends a line to `bytes-HOST.jsonl` in its records directory on SIGUSR1 and when it ends
(workers/worker_records.py). Counters are cumulative since the worker started.
"""

import json
import os
import signal
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from testbed.capture.context import Context
from testbed.lab.control import ask_lab
from testbed.lab.messages import ByteCounts, CountBytes
from testbed.lab.processes import HostProcess, HostProcesses
from testbed.lab.record import LabError, Record

_PATIENCE_S = 3.0
_POLL_S = 0.002
_TOGETHER_NS = 100_000_000  # notes of two workers nearer than this belong to one reading
SLACK_NS = 50_000_000  # what may lie between a count and its packets
_NEGLIGIBLE = 0.01  # of what was counted: may be left out for the sake of a level reading
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


def count_bytes(record: Record, processes: HostProcesses) -> ByteCounts:
    """Have every worker note its counters now.

    Returns the hosts that did, those that did not in time, and whether the notes are `level`: everything that was
    sent has been received, so nothing was on its way.
    """
    asked: dict[str, tuple[Path, int]] = {}
    for host, process in list(processes.by_host.items()):
        file = record.results / f"bytes-{host}.jsonl"
        # before it is ready a worker has no handler, and the signal would end it
        if process.host.role and process.state == "ready" and process.pid:
            asked[host] = (file, _size(file))
            _signal(process)
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
    return ByteCounts(sorted(noted), silent, level)


def _signal(process: HostProcess) -> None:
    """SIGUSR1 to a worker that is still there. Held by a descriptor before its state is read again: the number of one
    that has ended may be another's, which the signal would end."""
    assert process.pid is not None
    with suppress(ProcessLookupError):
        worker = os.pidfd_open(process.pid)
        try:
            if process.state == "ready":
                signal.pidfd_send_signal(worker, signal.SIGUSR1)
        finally:
            os.close(worker)


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
    """True when the receiver had counted all that the sender had: nothing was on its way between them."""
    return sender.with_peer(receiver.host, "sent") == receiver.with_peer(sender.host, "received")


@dataclass(frozen=True, slots=True)
class PairCount:
    """Counts by two workers of the traffic from one to the other, each between two of its own notes.

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
    """The counts between notes of a sender and of a receiver within a capture; None with less than two of either.

    Chooses the first and the last of each, or a level reading next to them: next to means that hardly anything was
    counted in between, since a counter that is wrong is level with its peer only before anything was counted. What a
    receiver counts at first left before the capture began, and what a sender counts last passes after it has ended
    (`before_ns` and `after_ns`: the way to the point of capture and on): such notes serve only where nothing was on
    its way. Raises BadCounters when a worker started anew.
    """
    sent, received = _inside(senders, within), _inside(receivers, within)
    if len(sent) < 2 or len(received) < 2:
        return None
    traffic = _Traffic(sent[0].host, received[0].host)
    negligible = traffic.between((sent[0], received[0]), (sent[-1], received[-1])) * _NEGLIGIBLE
    level = [pair for pair in _readings(sent, received) if is_level(*pair)]
    begin = next((pair for pair in level if traffic.between((sent[0], received[0]), pair) <= negligible), None)
    end = next((pair for pair in level[::-1] if traffic.between(pair, (sent[-1], received[-1])) <= negligible), None)
    if begin is not None and begin == end:  # nothing was counted at all, or there is but one level reading
        end = None
    first = begin or (sent[0], _first_from(received, within[0] + after_ns + SLACK_NS))
    last = end or (_last_until(sent, within[1] - before_ns), received[-1])
    if first[1] is None or last[0] is None:
        return None
    begins, ends = (first[0], first[1]), (last[0], last[1])
    if any(early.time_ns >= late.time_ns for early, late in zip(begins, ends, strict=True)):
        return None
    return PairCount(
        (begins[0].time_ns, ends[0].time_ns),
        (begins[1].time_ns, ends[1].time_ns),
        traffic.sent(begins[0], ends[0]),
        traffic.received(begins[1], ends[1]),
        begin is not None,
        end is not None,
    )


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Bytes that one worker counted of another between two notes."""

    sender: str
    receiver: str

    def sent(self, early: Note, late: Note) -> dict[str, int]:
        return _difference(early.with_peer(self.receiver, "sent"), late.with_peer(self.receiver, "sent"))

    def received(self, early: Note, late: Note) -> dict[str, int]:
        return _difference(early.with_peer(self.sender, "received"), late.with_peer(self.sender, "received"))

    def between(self, early: tuple[Note, Note], late: tuple[Note, Note]) -> int:
        """Bytes between two readings, by whichever of the two counted more."""
        return max(sum(self.sent(early[0], late[0]).values()), sum(self.received(early[1], late[1]).values()))


def _first_from(notes: Sequence[Note], time_ns: int) -> Note | None:
    return next((note for note in notes if note.time_ns >= time_ns), None)


def _last_until(notes: Sequence[Note], time_ns: int) -> Note | None:
    return next((note for note in reversed(notes) if note.time_ns <= time_ns), None)


def _inside(notes: Sequence[Note], within: Window) -> list[Note]:
    inside = [note for note in notes if within[0] <= note.time_ns <= within[1]]
    for before, after in pairwise(inside):
        if before.pid != after.pid or any(after.bytes.get(key, 0) < size for key, size in before.bytes.items()):
            raise BadCounters(f"{before.host} started anew during the capture: its counters cannot be compared")
    return inside


def _readings(sent: Sequence[Note], received: Sequence[Note]) -> Iterator[tuple[Note, Note]]:
    """Notes of the two that were taken together."""
    times = [note.time_ns for note in received]
    for note in sent if times else ():
        at = bisect_left(times, note.time_ns)
        nearest = min(received[max(0, at - 1) : at + 1], key=lambda other: abs(other.time_ns - note.time_ns))
        if abs(nearest.time_ns - note.time_ns) < _TOGETHER_NS:
            yield note, nearest


def _difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: size - before.get(name, 0) for name, size in after.items()}


def lags_s(context: Context) -> tuple[float, float]:
    """Times that a reading must keep from the capture's begin and end where something is always on its way.

    What a worker has just received left before; what it has just sent has yet to pass the point of capture.
    """
    passages = context.passages or ()
    before_ns = max((passage.before_ns for passage in passages), default=0)
    after_ns = max((passage.after_ns for passage in passages), default=0)
    return (after_ns + 2 * SLACK_NS) / 1e9, before_ns / 1e9


class CounterReader:
    """Has the counters noted at one end of a capture, again and again until nothing is on its way, within limits.

    `step` is called until it returns True.
    """

    def __init__(self, record: Record, patience_s: float, *, before_s: float = 0.0, after_s: float = 0.0) -> None:
        """`before_s`: the last reading is not taken earlier; `after_s`: nothing more is done for so long after it."""
        self._record = record
        self._not_before = time.monotonic() + before_s
        self._after_s = after_s
        self._last_reading = time.monotonic() + max(patience_s, before_s)
        self._done_at: float | None = None
        self.noted: set[str] | None = None  # the workers that noted their counters each time; None: not asked yet

    def step(self) -> bool:
        """Read the counters, unless that is over; True when a quiet moment was found or the limits are reached."""
        if self._done_at is None:
            self._done_at = self._read()
        return self._done_at is not None and time.monotonic() >= self._done_at

    def _read(self) -> float | None:
        """The time to be done, if this was the last reading."""
        now = time.monotonic()
        try:
            reply = ask_lab(self._record, CountBytes())
        except LabError:  # it is going away; the recorder will notice
            return now
        noted = set(reply.counted)
        self.noted = noted if self.noted is None else self.noted & noted
        if reply.level and now >= self._not_before:
            return now
        return None if now < self._last_reading else time.monotonic() + self._after_s
