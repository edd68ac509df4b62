"""A timeline once it is read and checked: immutable events in the order of the file, ready to be played.

Owns the runtime types and their form in JSON (how `pddbed wan play` hands a timeline to a lab). Times are ns since
the timeline began. Knows no file, no clock and no kernel.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from testbed.model.impairment import BernoulliLoss, CoDel, GilbertElliottLoss, Jitter
from testbed.model.trace import Trace

if TYPE_CHECKING:
    from testbed.model.direction import Direction

ANY, EACH = "any", "each"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one direction, as (name, value) pairs; what is not named is kept.

    Names are the fields of an `Impairment`, or `queue_bdp`, a queue as a multiple of the BDP. `queue_bytes` None
    stands for the default queue of the rate that then holds.
    """

    values: tuple[tuple[str, Any], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` reads them back."""
        models = ("jitter", "loss", "codel")
        return {name: asdict(value) if name in models and value else value for name, value in self.values}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Change":
        """The inverse of `to_dict`. Raises ValueError or TypeError."""
        return cls(tuple((name, _value(name, value)) for name, value in plain.items()))


def _value(name: str, plain: Any) -> Any:
    if plain is None:
        return None
    match name:
        case "jitter":
            return Jitter(**plain)
        case "codel":
            return CoDel(**plain)
        case "loss":
            return BernoulliLoss(**plain) if "probability" in plain else GilbertElliottLoss(**plain)
    return plain


@dataclass(frozen=True, slots=True)
class Step:
    """Other values from its moment on."""

    change: Change


@dataclass(frozen=True, slots=True)
class Ramp:
    """A way from one value to another. `values` has (an Impairment's field, from, to); loss is a probability."""

    duration_ns: int
    values: tuple[tuple[str, float, float], ...]

    def change_at(self, share: float) -> Change:
        """The values after a share of its time, from 0 to 1: never beyond either end, the last one exactly."""
        values: list[tuple[str, Any]] = []
        for name, start, end in self.values:
            value = end if share >= 1 else min(max(start + (end - start) * share, min(start, end)), max(start, end))
            if name == "loss":
                values.append((name, BernoulliLoss(value) if value else None))
            else:
                values.append((name, round(value)))
        return Change(tuple(values))


@dataclass(frozen=True, slots=True)
class Outage:
    """New arrivals are dropped, what is in flight arrives."""

    duration_ns: int


@dataclass(frozen=True, slots=True)
class CrossTraffic:
    """Flows between the link's own end hosts. Rates count IP bytes; `on_ns` None: no bursts, always on."""

    duration_ns: int
    protocol: Literal["tcp", "udp"]
    rate_bps: int | None  # of all flows together, while they are on
    flows: int = 1
    on_ns: int | None = None  # mean lengths of exponentially distributed bursts and pauses
    off_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace from its beginning; again and again when it is shorter than the duration."""

    duration_ns: int
    trace: Trace


What = Step | Ramp | Outage | CrossTraffic | Replay
KINDS: dict[str, type[What]] = {
    "step": Step,
    "ramp": Ramp,
    "outage": Outage,
    "cross_traffic": CrossTraffic,
    "replay": Replay,
}


@dataclass(frozen=True, slots=True)
class Trigger:
    """Starts an event when something is told: `request` is any (the first), each (once for every one), or an id."""

    event: str
    fraction: float | None = None  # at least; None: as soon as it is told
    request: str = ANY


@dataclass(frozen=True, slots=True)
class Event:
    """One entry: what happens where, at `at_ns` or when `trigger` is pulled, `times` times every `every_ns`."""

    number: int  # its place in the file, from 0
    what: What
    targets: tuple[tuple[str, "Direction"], ...]  # (link, direction)
    at_ns: int | None = None
    trigger: Trigger | None = None
    every_ns: int = 0
    times: int = 1

    @property
    def kind(self) -> str:
        """The name of its kind in the file."""
        return next(kind for kind, cls in KINDS.items() if isinstance(self.what, cls))

    @property
    def duration_ns(self) -> int:
        """The duration of one occurrence; 0 for a step."""
        return 0 if isinstance(self.what, Step) else self.what.duration_ns

    def starts_ns(self) -> tuple[int, ...]:
        """The starts of every occurrence that is due at a time; empty for a triggered event."""
        if self.at_ns is None:
            return ()
        return tuple(self.at_ns + number * self.every_ns for number in range(self.times))

    def to_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """Plain values for JSON; not whole: without the values of traces."""
        what = {name: getattr(self.what, name) for name in self.what.__dataclass_fields__}
        for name, value in what.items():
            if isinstance(value, Change):
                what[name] = value.to_dict()
            elif isinstance(value, Trace):
                what[name] = value.to_dict() if whole else value.summary()
        trigger = asdict(self.trigger) if self.trigger is not None else None
        return {
            "number": self.number,
            self.kind: what,
            "targets": [list(target) for target in self.targets],
            "at_ns": self.at_ns,
            "trigger": trigger,
            "every_ns": self.every_ns,
            "times": self.times,
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Event":
        kind = next(kind for kind in KINDS if kind in plain)
        fields = dict(plain[kind])
        if kind == "step":
            fields["change"] = Change.from_dict(fields["change"])
        if kind == "ramp":
            fields["values"] = tuple((name, start, end) for name, start, end in fields["values"])
        if kind == "replay":
            fields["trace"] = Trace.from_dict(fields["trace"])
        trigger = plain["trigger"]
        return cls(
            number=plain["number"],
            what=KINDS[kind](**fields),
            targets=tuple((link, direction) for link, direction in plain["targets"]),
            at_ns=plain["at_ns"],
            trigger=Trigger(**trigger) if trigger else None,
            every_ns=plain["every_ns"],
            times=plain["times"],
        )


@dataclass(frozen=True, slots=True)
class Timeline:
    """Everything that is to happen. All that is random in it follows from `seed`."""

    events: tuple[Event, ...]
    seed: int
    source: str = ""  # the file it came from, for people

    @property
    def length_ns(self) -> int | None:
        """The end of the last occurrence that is due at a time; None where nothing is."""
        ends = [event.starts_ns()[-1] + event.duration_ns for event in self.events if event.at_ns is not None]
        return max(ends, default=None)

    def to_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` reads back what is whole (has the values of traces)."""
        events = [event.to_dict(whole=whole) for event in self.events]
        return {"events": events, "seed": self.seed, "source": self.source}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Timeline":
        """The inverse of `to_dict`. Raises KeyError, TypeError, ValueError or StopIteration."""
        return cls(tuple(map(Event.from_dict, plain["events"])), plain["seed"], plain["source"])
