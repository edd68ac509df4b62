"""The schedule of a timeline: its moves in the order of their logical times. Pure: no clock, no I/O.

Whoever plays it asks `next_ns`, waits, and takes what is `due`; what is told out of band goes to `tell`. Times are ns
since the timeline began; what has to be prepared before that is due at a negative time. Endings come before beginnings
of the same moment, then the order of the file holds.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from testbed.model.timeline import ANY, EACH, Change, CrossTraffic, Event, Outage, Ramp, Replay, Step, Timeline, Trigger

PREPARE_AHEAD_NS = 2_000_000_000
RAMP_STEP_NS = 20_000_000
MAX_RAMP_STEPS = 1_000
MAX_REQUESTS = 100_000  # that a trigger remembers to have fired for


@dataclass(frozen=True, slots=True)
class Assign:
    """Other values from now on."""

    change: Change


@dataclass(frozen=True, slots=True)
class Remember:
    """Before a replay: note what its values are."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PutBack:
    """After a replay: what was noted, unless somebody has changed it since."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """New arrivals are dropped from now on."""


@dataclass(frozen=True, slots=True)
class Heal:
    """New arrivals pass again."""


@dataclass(frozen=True, slots=True)
class PrepareTraffic:
    """Processes are started a while before their flows, so that these begin on time."""


@dataclass(frozen=True, slots=True)
class StartTraffic:
    """Flows begin; they end by themselves."""


@dataclass(frozen=True, slots=True)
class StopTraffic:
    """Flows have ended: count them."""


Action = Assign | Remember | PutBack | Cut | Heal | PrepareTraffic | StartTraffic | StopTraffic
_ENDINGS = (PutBack, Heal, StopTraffic)


@dataclass(frozen=True, slots=True)
class Move:
    """One action of one occurrence of an event, at a logical time."""

    at_ns: int
    event: Event
    occurrence: int
    start_ns: int  # of its occurrence
    action: Action

    @property
    def is_last(self) -> bool:
        """Nothing of its occurrence comes after it."""
        return self.at_ns - self.start_ns >= self.event.duration_ns

    @property
    def key(self) -> tuple[int, bool, int, int]:
        """The order of moves; those of one occurrence keep their own."""
        return (self.at_ns, not isinstance(self.action, _ENDINGS), self.event.number, self.occurrence)


@dataclass(frozen=True, slots=True)
class ServingEvent:
    """An event that a worker reports: `fraction` is its progress, 0 to 1."""

    event: str
    fraction: float = 1.0
    request: str = ""


def moves(event: Event, occurrence: int, start_ns: int) -> Iterator[Move]:
    """Everything that one occurrence does, in order; never more in memory than one."""
    for offset, action in _actions(event):
        yield Move(start_ns + offset, event, occurrence, start_ns, action)


def _actions(event: Event) -> Iterator[tuple[int, Action]]:
    what = event.what
    if isinstance(what, Step):
        yield 0, Assign(what.change)
    elif isinstance(what, Ramp):
        steps = ramp_steps(what.duration_ns)
        for step in range(steps + 1):
            yield what.duration_ns * step // steps, Assign(what.change_at(step / steps))
    elif isinstance(what, Outage):
        yield 0, Cut()
        yield what.duration_ns, Heal()
    elif isinstance(what, CrossTraffic):
        yield -PREPARE_AHEAD_NS, PrepareTraffic()
        yield 0, StartTraffic()
        yield what.duration_ns, StopTraffic()
    elif isinstance(what, Replay):
        names = tuple(what.trace.columns)
        yield 0, Remember(names)
        for offset, index in what.trace.played(what.duration_ns):
            yield offset, Assign(Change(what.trace.values(index)))
        yield what.duration_ns, PutBack(names)


def ramp_steps(duration_ns: int) -> int:
    """The number of small steps of a ramp: one each 20 ms, at most 1,000."""
    return max(1, min(MAX_RAMP_STEPS, duration_ns // RAMP_STEP_NS))


@dataclass
class _Waiting:
    """A trigger that may still be pulled."""

    event: Event
    trigger: Trigger
    fired: int = 0
    requests: set[str] = field(default_factory=set)

    def pulled_by(self, told: ServingEvent) -> bool:
        trigger = self.trigger
        if told.event != trigger.event or (trigger.fraction is not None and told.fraction < trigger.fraction):
            return False
        if trigger.request == EACH:
            if told.request in self.requests or len(self.requests) >= MAX_REQUESTS:
                return False
            self.requests.add(told.request)
            return True
        return self.fired == 0 and trigger.request in (ANY, told.request)


class Schedule:
    """The moves of a timeline that are still to come."""

    def __init__(self, timeline: Timeline) -> None:
        self._heap: list[tuple[tuple[int, bool, int, int], int, Move, Iterator[Move]]] = []
        self._pushed = 0
        self._occurrences: dict[int, int] = {}
        self._waiting: list[_Waiting] = []
        for event in timeline.events:
            if event.trigger is not None:
                self._waiting.append(_Waiting(event, event.trigger))
            for start in event.starts_ns():
                self._begin(event, start)

    def next_ns(self) -> int | None:
        """The time of the next move; None when there is none (a trigger may still bring some)."""
        return self._heap[0][2].at_ns if self._heap else None

    @property
    def next_move(self) -> Move | None:
        return self._heap[0][2] if self._heap else None

    @property
    def done(self) -> bool:
        """Nothing is to come, and nothing can be told that would bring more."""
        return not self._heap and not self.waiting()

    def due(self, now_ns: int) -> list[Move]:
        """Everything up to now, in order, each once."""
        taken = []
        while self._heap and self._heap[0][2].at_ns <= now_ns:
            _, _, move, rest = heapq.heappop(self._heap)
            taken.append(move)
            self._push(rest)
        return taken

    def tell(self, told: ServingEvent, at_ns: int) -> list[Event]:
        """Something happened at `at_ns`: the events that it starts, then and there."""
        started = []
        for waiting in self._waiting:
            if waiting.pulled_by(told):
                waiting.fired += 1
                started.append(waiting.event)
                for number in range(waiting.event.times):
                    self._begin(waiting.event, at_ns + number * waiting.event.every_ns)
        return started

    def occurrences(self, event: Event) -> int:
        """The number of times that an event has begun, or is due to."""
        return self._occurrences.get(event.number, 0)

    def waiting(self) -> list[Event]:
        """Triggered events that may still start."""
        return [w.event for w in self._waiting if w.trigger.request == EACH or w.fired == 0]

    def _begin(self, event: Event, start_ns: int) -> None:
        occurrence = self._occurrences.get(event.number, 0)
        self._occurrences[event.number] = occurrence + 1
        self._push(moves(event, occurrence, start_ns))

    def _push(self, rest: Iterator[Move]) -> None:
        move = next(rest, None)
        if move is not None:
            self._pushed += 1
            heapq.heappush(self._heap, (move.key, self._pushed, move, rest))
