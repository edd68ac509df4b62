"""Application of a timeline's moves to a running lab: values, outages, cross traffic. One `perform` for each move.

Owns what is needed to undo them: the values that a replay found, the outages that are on. Called by one thread, the
player's. A change goes through `WanControl`, so that it composes with `pddbed wan set`: whoever names a value last
wins, and what is not named is kept.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import monotonic_ns
from typing import Any

from testbed.congestion.schedule import (
    Assign,
    Cut,
    Heal,
    Move,
    PrepareTraffic,
    PutBack,
    Remember,
    StartTraffic,
    StopTraffic,
)
from testbed.congestion.traffic.pool import Source, Stream, TrafficPool
from testbed.lab.endpoints import Endpoint, endpoints
from testbed.lab.network import Network
from testbed.lab.wan import WanControl
from testbed.links.outage import OutageFilter
from testbed.model.direction import DIRECTIONS, Direction
from testbed.model.impairment import NS_PER_S
from testbed.model.plan import LabPlan
from testbed.model.timeline import Change, CrossTraffic, Event, Outage, Replay, Step, Timeline
from testbed.topology.traces.mahimahi import OPPORTUNITY_BITS
from testbed.topology.traces.read import DEFAULT_GRANULARITY_NS

Target = tuple[str, Direction]
Key = tuple[int, int]  # event, occurrence
Write = Callable[..., None]  # (what, **fields): a line for the lab's congestion.jsonl


@dataclass(frozen=True, slots=True)
class Done:
    """The effect of a move: its name for the log, further fields to write down, and its time."""

    what: str
    fields: dict[str, Any]
    at_ns: int


class Applier:
    """The links of one lab, for one timeline."""

    def __init__(self, plan: LabPlan, network: Network, wan: WanControl, timeline: Timeline, write: Write) -> None:
        self._plan = plan
        self._network = network
        self._wan = wan
        self._pool = TrafficPool(timeline.seed, write)
        self._filters: dict[Target, OutageFilter] = {}
        self._ends: dict[str, tuple[Endpoint, Endpoint]] = {}
        self._found: dict[Key, dict[Target, Change]] = {}  # before a replay
        self._written: dict[Key, Change] = {}  # last, by a replay
        self._before_cut: dict[Key, dict[Target, tuple[int, int]]] = {}  # packets and bytes dropped so far

    def set_up(self, timeline: Timeline) -> None:
        """Make filters and end hosts before they are needed. Raises FilterError, OSError, NetlinkError."""
        for event in timeline.events:
            for target in event.targets:
                if isinstance(event.what, Outage) and target not in self._filters:
                    link, direction = target
                    end = self._network.links[link].ends[DIRECTIONS.index(direction)]
                    self._filters[target] = OutageFilter(end.pid, end.ifname)
                if isinstance(event.what, CrossTraffic):
                    self._ends[target[0]] = endpoints(self._plan, self._network, target[0])

    @property
    def counting(self) -> bool:
        """True when cross traffic is on, or still being counted."""
        return self._pool.counting

    def prepare_traffic(self, event: Event, occurrence: int) -> list[Stream]:
        """Start the processes of an event's flows; they wait to be set off."""
        assert isinstance(event.what, CrossTraffic)
        sources = [self._source(link, direction) for link, direction in event.targets]
        return self._pool.prepare(event.number, occurrence, event.what, sources)

    def perform(self, move: Move, due_ns: int) -> Done:
        """Do one move. `due_ns` is its logical time by CLOCK_MONOTONIC. Raises what links and filters raise."""
        event, key = move.event, (move.event.number, move.occurrence)
        match move.action:
            case Assign(change):
                self._assign(event, change)
                if key in self._found:
                    self._written[key] = change
                done = Done("set", {"values": change.to_dict()}, monotonic_ns())
                if isinstance(event.what, Step) and "rate_bps" in change.names:
                    self._wan.tell_rates()  # what hosts may hand over at once; too slow for each step of a replay
                return done
            case Remember(names):
                return Done("replay-begin", {"found": self._remember(event, key, names)}, monotonic_ns())
            case PutBack():
                return Done("replay-end", {"put_back": self._put_back(key)}, monotonic_ns())
            case Cut():
                self._cut(event, key)
                return Done("cut", {}, monotonic_ns())
            case Heal():
                return self._heal(event, key)
            case PrepareTraffic():
                self.prepare_traffic(event, move.occurrence)
                return Done("traffic-prepare", {}, monotonic_ns())
            case StartTraffic():
                for stream in self.prepare_traffic(event, move.occurrence):
                    stream.start(due_ns)
                return Done("traffic-begin", {}, monotonic_ns())
            case StopTraffic():
                return Done("traffic-end", {}, monotonic_ns())

    def clear(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """End what must not outlive the timeline; yields what there is to write down about it."""
        self._pool.stop()
        for key in list(self._found):
            yield "replay-end", {"event": key[0], "occurrence": key[1], "put_back": self._put_back(key)}
        for (link, direction), outage_filter in self._filters.items():
            if outage_filter.is_cut:
                yield "heal", {"targets": [[link, direction]]}
            outage_filter.close()
        self._filters.clear()

    def _assign(self, event: Event, change: Change) -> None:
        for link in dict.fromkeys(link for link, _ in event.targets):
            self._wan.change(link, [way for other, way in event.targets if other == link], change)

    def _remember(self, event: Event, key: Key, names: tuple[str, ...]) -> list[Any]:
        """Note what a replay will overwrite; a link without a rate gets the default queue of the fastest it plays."""
        self._found[key] = {}
        for link, way in event.targets:
            asked = self._wan.asked(link, way)
            self._found[key][link, way] = Change(tuple((name, getattr(asked, name)) for name in names))
            rates = event.what.trace.columns.get("rate_bps") if isinstance(event.what, Replay) else None
            if asked.rate_bps is None and rates is not None:
                self._wan.change(link, [way], Change((("rate_bps", max(rates)),)))
        return _plain(self._found[key])

    def _put_back(self, key: Key) -> list[Any]:
        """Put back the values that the replay found, but for those that somebody has changed since it wrote them."""
        written = dict(self._written.pop(key, Change(())).values)
        back: dict[Target, Change] = {}
        for (link, way), found in self._found.pop(key, {}).items():
            asked = self._wan.asked(link, way)
            values = [(name, value) for name, value in found.values if getattr(asked, name) == written.get(name)]
            back[link, way] = Change(tuple(values))
            if values:
                self._wan.change(link, [way], back[link, way])
        return _plain(back)

    def _cut(self, event: Event, key: Key) -> None:
        for target in event.targets:
            self._filters[target].cut()
        self._before_cut[key] = {target: self._filters[target].counted for target in event.targets}

    def _heal(self, event: Event, key: Key) -> Done:
        """Writes down (link, direction, packets, bytes) that were dropped since this outage began."""
        for target in event.targets:
            self._filters[target].heal()
        at_ns = monotonic_ns()
        before = self._before_cut.pop(key, {})
        dropped = []
        for target in event.targets:
            packets, size = self._filters[target].count()
            packets_before, size_before = before.get(target, (0, 0))
            dropped.append([*target, packets - packets_before, size - size_before])
        return Done("heal", {"dropped": dropped}, at_ns)

    def _source(self, link: str, direction: Direction) -> Source:
        ends = self._ends[link] if direction == "forward" else self._ends[link][::-1]
        wan = next(wan for wan in self._plan.wans if wan.name == link)

        def drain_ns() -> int:
            asked = [self._wan.asked(link, way) for way in DIRECTIONS]
            return sum(value.longest_delay_ns() + value.serialization_ns(value.queue_bytes or 0) for value in asked)

        return Source(link, direction, ends[0].pid, ends[1].pid, str(ends[1].address), wan.mtu, drain_ns)


def adapted(timeline: Timeline, drivers: Mapping[str, str]) -> Timeline:
    """The timeline for the drivers that the links turned out to have.

    netem gives a packet its time when it arrives, by the rate that holds then: a rate of nearly nothing would hold up
    everything behind that packet, so one packet per step of a replay goes through instead, taken off what follows.
    """
    return replace(timeline, events=tuple(_adapted(event, drivers) for event in timeline.events))


def _adapted(event: Event, drivers: Mapping[str, str]) -> Event:
    if not isinstance(event.what, Replay) or all(drivers[link] != "netem" for link, _ in event.targets):
        return event
    least_bps = OPPORTUNITY_BITS * NS_PER_S // (event.what.trace.granularity_ns or DEFAULT_GRANULARITY_NS)
    return replace(event, what=replace(event.what, trace=event.what.trace.floored(least_bps)))


def _plain(values: Mapping[Target, Change]) -> list[Any]:
    return [[link, direction, change.to_dict()] for (link, direction), change in values.items()]
