"""Compilation of a file's entries to a timeline, with every mistake: the only way to make one from what a person wrote.

Owns the rules for one entry; `conflicts` has those between entries and links. Reads trace files, builds and
changes nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from testbed.model.direction import DIRECTIONS
from testbed.model.timeline import KINDS, CrossTraffic, Event, Outage, Ramp, Replay, Step, Timeline, Trigger, What
from testbed.model.trace import Trace
from testbed.model.units import format_duration, quote
from testbed.topology import schema
from testbed.topology.explain import did_you_mean
from testbed.topology.problems import Path, Problem
from testbed.topology.salvage import readable
from testbed.topology.timeline.conflicts import Conflict, conflicts, overloads
from testbed.topology.timeline.link_values import LinkFacts, change_of
from testbed.topology.traces.csv_trace import LEAST_GAP_NS
from testbed.topology.traces.read import TraceErrors, read_trace

MAX_OCCURRENCES = 100_000
MAX_CHANGES_IN_ALL = 250_000  # of all replays together: what a lab keeps, and takes over its control socket
NO_LINK_MAX_RATE_BPS = 100_000_000_000  # where the link is a mistake of its own
MAX_GRANULARITY_NS = 10_000_000_000

Place = Callable[[Path, str], Problem]  # a problem at a path of the file


@dataclass
class _Compiler:
    links: Sequence[LinkFacts] | None
    folder: FilePath
    place: Place
    problems: list[Problem] = field(default_factory=list)
    _traces: dict[Any, Trace | None] = field(default_factory=dict)

    def wrong(self, path: Path, message: str) -> None:
        self.problems.append(self.place(path, message))

    def event(self, number: int, entry: schema.CongestionEntry) -> Event | None:
        """One entry; None where it has a mistake."""
        given = [kind for kind in KINDS if kind in entry.model_fields_set]
        if len(given) != 1:
            return None  # the schema has said so
        path: Path = ("congestion", number, given[0])
        section = getattr(entry, given[0])
        if section is None:
            self.wrong(path, "is empty; write at least when, as in {at: 5s, ...}")
            return None
        if not readable(section):
            return None
        before = len(self.problems)
        self._timing(path, section)
        targets = self._targets(path, section)
        what = getattr(self, f"_{given[0]}")(path, section)
        if len(self.problems) > before or what is None or not targets:
            return None
        when, repeat = section.when, section.repeat
        event = Event(
            number=number,
            what=what,
            targets=targets,
            at_ns=section.at,
            trigger=Trigger(when.event, when.fraction, when.request) if when is not None else None,
            every_ns=repeat.every if repeat is not None else 0,
            times=repeat.times if repeat is not None else 1,
        )
        return event if self._repeats(path, event) else None

    def _timing(self, path: Path, section: schema.Timed) -> None:
        if section.at is None and section.when is None:
            self.wrong(path, "says no time; write at: 5s (or when: {event: ...})")
        if section.at is not None and section.when is not None:
            self.wrong((*path, "when"), "at and when are both given; keep one of them")

    def _repeats(self, path: Path, event: Event) -> bool:
        if event.times == 1:
            return True
        where = (*path, "repeat", "every")
        if event.every_ns == 0:
            self.wrong(where, "0s is no distance; write a longer one")
            return False
        if event.every_ns < event.duration_ns and not isinstance(event.what, CrossTraffic):
            every, duration = format_duration(event.every_ns), format_duration(event.duration_ns)
            self.wrong(where, f"every {every} begins again before it is over ({duration}); make it longer")
            return False
        return True

    def _targets(self, path: Path, section: schema.Timed) -> tuple[Any, ...]:
        if self.links is None:
            return ()
        names = [link.name for link in self.links]
        if section.link is None:
            if len(names) != 1:
                choice = f"name one of {', '.join(names)}" if names else "there is no WAN link to change"
                self.wrong(path, f"says no link; {choice}")
                return ()
            name = names[0]
        else:
            name = section.link
            if name not in names:
                guess = did_you_mean(name, names) or f"; links are {', '.join(names) or 'none'}"
                self.wrong((*path, "link"), f"{quote(name)} is no WAN link{guess}")
                return ()
        return tuple((name, way) for way in DIRECTIONS if section.direction in ("both", way))

    def _step(self, path: Path, section: schema.Step) -> What | None:
        try:
            change = change_of(section)
        except ValueError as error:
            self.wrong((*path, "loss"), str(error).removeprefix("loss: "))
            return None
        queue = section.queue
        if queue is not None and queue.bdp is not None and queue.bytes is not None:
            self.wrong((*path, "queue"), "bdp and bytes are given; keep one of them")
        elif queue is not None and not queue.model_fields_set:
            self.wrong((*path, "queue"), "has no size; write {bdp: 1.5} or {bytes: 8MiB}")
        elif not change.values:
            keys = ", ".join(schema.Direction.model_fields)
            self.wrong(path, f"changes nothing; name one or more of {keys}")
        return Step(change)

    def _ramp(self, path: Path, section: schema.Ramp) -> What | None:
        pairs = (("rate_bps", section.rate), ("delay_ns", section.delay), ("loss", section.loss))
        values = tuple((name, pair[0], pair[1]) for name, pair in pairs if pair is not None)
        if not values:
            self.wrong(
                path, "changes nothing; write one or more of rate, delay and loss, as in rate: [100mbit, 10mbit]"
            )
        if section.duration == 0:
            self.wrong((*path, "duration"), "0s is no ramp; write a step")
        return Ramp(section.duration, values)

    def _outage(self, path: Path, section: schema.Outage) -> What | None:
        self._lasts(path, section.duration)
        return Outage(section.duration)

    def _cross_traffic(self, path: Path, section: schema.CrossTraffic) -> What | None:
        self._lasts(path, section.duration)
        if section.protocol == "udp" and section.rate is None:
            self.wrong(path, "has no rate, and udp sends at one; write rate: 10mbit, say")
        bursts = section.bursts
        for name in ("on", "off") if bursts is not None else ():
            if getattr(bursts, name) == 0:
                self.wrong((*path, "bursts", name), "0s is no mean length; leave bursts out to send all the time")
        on_ns, off_ns = (bursts.on, bursts.off) if bursts is not None else (None, None)
        return CrossTraffic(section.duration, section.protocol, section.rate, section.flows, on_ns, off_ns)

    def _replay(self, path: Path, section: schema.Replay) -> What | None:
        if section.duration is not None:
            self._lasts(path, section.duration)
        granularity = section.granularity
        if granularity is not None and not LEAST_GAP_NS <= granularity <= MAX_GRANULARITY_NS:
            least, most = format_duration(LEAST_GAP_NS), format_duration(MAX_GRANULARITY_NS)
            self.wrong((*path, "granularity"), f"{format_duration(granularity)} is outside of {least} to {most}")
            return None
        trace = self._trace(path, section)
        if trace is None:
            return None
        if trace.kind == "csv" and granularity is not None:
            self.wrong((*path, "granularity"), "is for Mahimahi traces; a CSV trace is played as it is; remove it")
        if trace.kind == "csv" and len(trace) == 1 and section.duration is None:
            self.wrong(path, f"{section.trace} has a single row; say for how long with duration:")
        return Replay(section.duration or trace.period_ns, trace)

    def _trace(self, path: Path, section: schema.Replay) -> Trace | None:
        """Read once, however many entries play it; its mistakes are reported once, too."""
        file = self.folder / FilePath(section.trace).expanduser()
        links = [link for link in self.links or () if section.link in (None, link.name)]
        most = min((link.max_rate_bps for link in links), default=NO_LINK_MAX_RATE_BPS)
        key = (file, section.format, section.granularity, most)
        if key not in self._traces:
            self._traces[key] = None
            try:
                self._traces[key] = read_trace(file, section.format, section.granularity, most)
            except TraceErrors as errors:
                for problem in errors.problems:
                    if problem.line is None:
                        self.wrong((*path, "trace"), f"{file}: {problem.message}")
                    else:
                        self.problems.append(problem)
        return self._traces[key]

    def _lasts(self, path: Path, duration_ns: int) -> None:
        if duration_ns == 0:
            self.wrong((*path, "duration"), "0s is nothing at all; write a longer duration")


def compile_timeline(
    entries: Sequence[schema.CongestionEntry],
    links: Sequence[LinkFacts] | None,
    *,
    folder: FilePath,
    seed: int,
    source: str,
    place: Place,
    memory_bytes: int,
) -> tuple[Timeline | None, list[Problem]]:
    """The timeline of a file's entries (None where anything is wrong with it), and every mistake.

    `entries` may have UNREADABLE values; nothing is said about these. `links` None: unknown, for the same reason.
    Traces are relative to `folder`.
    """
    if not readable(entries) or not entries:
        return None, []
    compiler = _Compiler(links, folder, place)
    read = [compiler.event(number, entry) for number, entry in enumerate(entries)]
    events = [event for event in read if event is not None]
    for conflict in _between(events, links, memory_bytes):
        event = conflict.event
        compiler.wrong(("congestion", event.number, event.kind), conflict.message)
    if compiler.problems or len(events) < len(entries):
        return None, compiler.problems
    return Timeline(tuple(events), seed, source), []


def _between(events: list[Event], links: Sequence[LinkFacts] | None, memory_bytes: int) -> Iterator[Conflict]:
    if not events:
        return
    occurrences = sum(event.times for event in events)
    if occurrences > MAX_OCCURRENCES:
        yield Conflict(events[-1], f"makes {occurrences:,} occurrences in all; the most is {MAX_OCCURRENCES:,}")
        return
    changes = sum(len(event.what.trace) for event in events if isinstance(event.what, Replay))
    if changes > MAX_CHANGES_IN_ALL:
        message = f"all replays come to {changes:,} changes in all; the most is {MAX_CHANGES_IN_ALL:,}"
        yield Conflict(events[-1], f"{message}; use fewer or shorter traces, or a larger granularity")
    yield from conflicts(events)
    if links is not None:
        yield from overloads(events, links, memory_bytes)
