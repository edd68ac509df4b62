"""Conflicts on a timeline: events that want the same value at once, and links that it would overload.

Pure. Owns the rules; `compile` owns where in the file they are reported. What a trigger starts has no time before it
happens, so only its values are judged.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from testbed.model.direction import DIRECTIONS, Direction
from testbed.model.drivers import refusal
from testbed.model.impairment import Impairment
from testbed.model.timeline import Change, Event, Outage, Ramp, Replay, Step
from testbed.model.units import format_duration, format_rate
from testbed.topology.checks.memory import SHARE
from testbed.topology.problems import dotted
from testbed.topology.timeline.link_values import LinkFacts, apply_change

Target = tuple[str, Direction]
Values = dict[Direction, Impairment]
MAX_STATES = 2_000  # of one link, that triggered changes are tried on


@dataclass(frozen=True, slots=True)
class Conflict:
    """A mistake of one event."""

    event: Event
    message: str


@dataclass(frozen=True, slots=True)
class _Claim:
    """An event's hold on one value of one direction (or on whether packets pass) from `start` until `end`."""

    start: int
    end: int
    event: Event


def conflicts(events: Sequence[Event]) -> Iterator[Conflict]:
    """Pairs of timed events that overlap where only one may act; each pair once, at the later one in the file."""
    claims: dict[tuple[Target, str], list[_Claim]] = {}
    for event in events:
        for target in event.targets:
            for name in _claimed(event):
                claims.setdefault((target, name), []).extend(
                    _Claim(start, start + event.duration_ns, event) for start in event.starts_ns()
                )
    reported: set[tuple[int, int]] = set()
    for ((link, direction), name), held in claims.items():
        held.sort(key=lambda claim: (claim.start, claim.event.number))
        longest: _Claim | None = None
        for claim in held:
            if longest is not None and _clash(longest, claim):
                first, second = sorted((longest.event, claim.event), key=lambda event: event.number)
                if (first.number, second.number) not in reported:
                    reported.add((first.number, second.number))
                    yield Conflict(second, _message(first, link, direction, name, longest, claim))
            if longest is None or claim.end >= longest.end:
                longest = claim


def _claimed(event: Event) -> tuple[str, ...]:
    what = event.what
    if isinstance(what, Step):
        return tuple("queue" if name in ("queue_bytes", "queue_bdp") else name for name in what.change.names)
    if isinstance(what, Ramp):
        return tuple(name for name, _, _ in what.values)
    if isinstance(what, Replay):
        return tuple(what.trace.columns)
    return ("outage",) if isinstance(what, Outage) else ()


def _clash(earlier: _Claim, later: _Claim) -> bool:
    """Overlap; a step has no length, and may stand at either end of something that has."""
    if earlier.start == earlier.end and later.start == later.end:
        return earlier.start == later.start
    if later.start == later.end:
        return earlier.start < later.start < earlier.end
    return later.start < earlier.end


def _message(first: Event, link: str, direction: Direction, name: str, one: _Claim, other: _Claim) -> str:
    value = {"rate_bps": "rate", "delay_ns": "delay", "duplication": "duplicate", "corruption": "corrupt"}.get(
        name, name
    )
    subject = "an outage" if name == "outage" else value
    spans = " and ".join(_span(claim) for claim in (one, other))
    return (
        f"overlaps with {dotted(('congestion', first.number, first.kind))}: {subject} of {link} {direction} ({spans}); "
        "move one of them or make it shorter"
    )


def _span(claim: _Claim) -> str:
    start = format_duration(claim.start)
    return f"at {start}" if claim.start == claim.end else f"{start} to {format_duration(claim.end)}"


def overloads(events: Sequence[Event], links: Sequence[LinkFacts], memory_bytes: int) -> Iterator[Conflict]:
    """Values that contradict, and packets in flight that memory or the driver cannot hold; each event once."""
    known = {link.name: link for link in links if link.values is not None}
    judge = _Judge(known, memory_bytes // SHARE)
    reported: set[int] = set()
    for event, message in (*judge.timed(events), *judge.triggered(events)):
        if event.number not in reported:
            reported.add(event.number)
            yield Conflict(event, message)


class _Judge:
    """Walks through a timeline with the values that every link is then asked to have."""

    def __init__(self, links: Mapping[str, LinkFacts], budget_bytes: int) -> None:
        self._links = links
        self._budget = budget_bytes
        self._values: dict[str, Values] = {name: dict(link.values or {}) for name, link in links.items()}
        self._seen: dict[str, set[tuple[Impairment, Impairment]]] = {name: set() for name in links}
        self._playing: dict[str, dict[int, tuple[list[Direction], Change]]] = {name: {} for name in links}

    def timed(self, events: Sequence[Event]) -> Iterator[tuple[Event, str]]:
        moments = [(time, ends, event) for event in events for time, ends in _moments(event)]
        for _, ends, event in sorted(moments, key=lambda moment: (moment[0], not moment[1], moment[2].number)):
            for name, ways in _ways(event).items():
                if name in self._links:
                    try:
                        self._advance(name, ways, event, ends)
                    except ValueError as error:
                        yield event, str(error)

    def triggered(self, events: Sequence[Event]) -> Iterator[tuple[Event, str]]:
        for event in events:
            for name, ways in _ways(event).items() if event.at_ns is None else ():
                link = self._links.get(name)
                states = [] if link is None else [(link.values["forward"], link.values["backward"])]  # type: ignore[index]
                for state in [*states, *list(self._seen.get(name, ()))[:MAX_STATES]]:
                    try:
                        for change in _extremes(event):
                            self._check(name, dict(zip(DIRECTIONS, state, strict=True)), ways, change)
                    except ValueError as error:
                        yield event, str(error)
                        break

    def _advance(self, name: str, ways: list[Direction], event: Event, ends: bool) -> None:
        """Raises ValueError."""
        link, playing = self._links[name], self._playing[name]
        if isinstance(event.what, Replay):
            if ends:
                playing.pop(event.number, None)
            else:
                for change in _extremes(event):
                    self._check(name, self._values[name], ways, change)
                    playing[event.number] = (ways, change)
            return
        changes = _extremes(event)
        if isinstance(event.what, Ramp):
            changes = changes[1:] if ends else changes[:1]
        for change in changes:
            self._values[name] = apply_change(self._values[name], ways, change, link.mtu)
            self._check(name, self._values[name], ways, change)

    def _check(self, name: str, values: Mapping[Direction, Impairment], ways: list[Direction], change: Change) -> None:
        """`values` with the change and with what is being replayed. Raises ValueError."""
        link = self._links[name]
        changed = apply_change(values, ways, change, link.mtu)
        for others, other in self._playing[name].values():
            changed = apply_change(changed, others, other, link.mtu)
        state = (changed["forward"], changed["backward"])
        if state in self._seen[name]:
            return
        for way in ways:
            rate_bps, queue = changed[way].rate_bps, changed[way].queue_bytes
            if "rate_bps" in change.names and rate_bps is not None and rate_bps > link.max_rate_bps:
                most = format_rate(link.max_rate_bps)
                raise ValueError(f"asks {name} {way} for {format_rate(rate_bps)}; its driver holds at most {most}")
            refused = [refusal(driver, changed[way], link.mtu) for driver in link.drivers]
            if all(refused):
                raise ValueError(f"asks {name} {way} for what its driver cannot do: {refused[0]}")
            if queue is not None and queue < link.mtu:
                raise ValueError(
                    f"leaves {name} {way} a queue of {queue:,} bytes, which cannot hold one packet of "
                    f"{link.mtu:,} bytes; make it larger"
                )
        held = {way: (changed[way].delay_line_bytes() or 0) + (changed[way].queue_bytes or 0) for way in DIRECTIONS}
        if sum(held.values()) > self._budget:
            sums = ", ".join(_sum(way, changed[way], held[way]) for way in DIRECTIONS)
            raise ValueError(
                f"lets {name} hold {_mib(sum(held.values()))} of packets ({sums}), more than the {_mib(self._budget)} "
                "that links may take here; lower the rate, the delay or the queue"
            )
        self._seen[name].add(state)


def _moments(event: Event) -> Iterator[tuple[int, bool]]:
    """(time, whether something ends) of what changes values."""
    if isinstance(event.what, Step | Ramp | Replay):
        for start in event.starts_ns():
            yield start, False
            if event.duration_ns:
                yield start + event.duration_ns, True


def _ways(event: Event) -> dict[str, list[Direction]]:
    ways: dict[str, list[Direction]] = {}
    for link, direction in event.targets:
        ways.setdefault(link, []).append(direction)
    return ways


def _extremes(event: Event) -> list[Change]:
    """The changes that an event makes; of a replay the largest values, of a ramp the first and the last."""
    what = event.what
    if isinstance(what, Step):
        return [what.change]
    if isinstance(what, Ramp):
        return [what.change_at(0.0), what.change_at(1.0)]
    if isinstance(what, Replay):
        columns = what.trace.columns
        largest = {name: max(columns[name]) for name in ("rate_bps", "delay_ns") if name in columns}
        return [Change(tuple(largest.items()))] if largest else []
    return []


def _sum(way: Direction, value: Impairment, held: int) -> str:
    rate = "no rate limit" if value.rate_bps is None else format_rate(value.rate_bps)
    product = f"{rate} x {format_duration(value.longest_delay_ns())}"
    return f"{way} {product} + queue {_mib(value.queue_bytes or 0)} = {_mib(held)}"


def _mib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
