"""Values of the links that a timeline changes: what each direction is asked at first, and changes of it. Pure.

The links are those of a topology file, of a plan or of a running lab. `pddbed wan set` shares the changes. Owns what
"the rest is kept" means: the queue keeps its size in bytes when the rate or the delay changes, and a link that gets its
first rate gets the file format's default queue.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from testbed.model.direction import DIRECTIONS, Direction
from testbed.model.impairment import CoDel, Impairment, Jitter, bdp_bytes
from testbed.model.plan import WanPlan
from testbed.model.timeline import Change
from testbed.topology import schema
from testbed.topology.checks.names import wan_name
from testbed.topology.directions import default_queue_bytes, effective, impairment, loss_of, rtt_ns
from testbed.topology.fields import NO_LIMIT
from testbed.topology.salvage import readable
from testbed.topology.schema import TopologyFile

# More than an emulator in userspace has carried anywhere; above the second, tbf's whole nanoseconds are too coarse.
_MAX_RATE_BPS = {"userspace": 20_000_000_000, "netem": 100_000_000_000}
_NAMES = {"duplicate": "duplication", "corrupt": "corruption", "reorder": "reordering"}


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """One link. `values`: the impairment of each direction before the timeline begins; None where the file is wrong."""

    name: str
    driver: str  # auto | netem | userspace
    mtu: int
    values: Mapping[Direction, Impairment] | None

    @property
    def drivers(self) -> tuple[str, ...]:
        """The drivers that may come to emulate it."""
        return tuple(_MAX_RATE_BPS) if self.driver == "auto" else (self.driver,)

    @property
    def max_rate_bps(self) -> int:
        """The largest rate that its driver can hold."""
        return max(_MAX_RATE_BPS[driver] for driver in self.drivers)


def links_of_file(file: TopologyFile) -> tuple[LinkFacts, ...] | None:
    """The links of a topology file, which may have mistakes; None where its links cannot be read at all."""
    if not readable(file.wan) or not readable(*(wan.name for wan in file.wan)):
        return None
    return tuple(_link_of_file(file, index) for index in range(len(file.wan)))


def _link_of_file(file: TopologyFile, index: int) -> LinkFacts:
    wan = file.wan[index]
    ways = [effective(wan, index, name) for name in DIRECTIONS]
    rtt = rtt_ns(*ways)
    values: dict[Direction, Impairment] | None = None
    if rtt is not None and readable(wan.mtu, *ways[0].values.values(), *ways[1].values.values()):
        try:
            values = {way.name: impairment(way, rtt, wan.mtu) for way in ways}
        except ValueError:  # reported by the checks of the link itself
            values = None
    mtu = wan.mtu if readable(wan.mtu) else 1500
    return LinkFacts(wan_name(file, index), wan.driver if readable(wan.driver) else "auto", mtu, values)


def links_of_plan(wans: Iterable[WanPlan]) -> tuple[LinkFacts, ...]:
    """The links of a plan, whose drivers may have been chosen since."""
    return tuple(
        LinkFacts(wan.name, wan.driver, wan.mtu, {"forward": wan.forward, "backward": wan.backward}) for wan in wans
    )


def links_of_lab(shown: Iterable[Mapping[str, Any]]) -> tuple[LinkFacts, ...]:
    """The links in a running lab's answer to `wan show`."""
    return tuple(
        LinkFacts(
            link["name"],
            link["driver"],
            link["mtu"],
            {direction: Impairment.from_dict(link["asked"][direction]) for direction in DIRECTIONS},
        )
        for link in shown
    )


def change_of(section: schema.Direction, removed: Iterable[str] = ()) -> Change:
    """The values that a section of the file names; `removed` are keys whose value is taken away. Raises ValueError."""
    removed = set(removed)
    values: dict[str, Any] = {}
    for key in schema.Direction.model_fields:
        value = None if key in removed else getattr(section, key)
        if value is None and key not in removed:
            continue
        match key:
            case "rate":
                values["rate_bps"] = None if value == NO_LIMIT else value
            case "delay":
                values["delay_ns"] = value or 0
            case "jitter":
                values["jitter"] = Jitter(value.std, value.distribution) if value and value.std else None
            case "loss":
                values["loss"] = loss_of(value)
            case "queue":
                values |= _queue(value)
            case _:
                values[_NAMES[key]] = value or 0.0
    return Change(tuple(values.items()))


def _queue(queue: schema.Queue | None) -> dict[str, Any]:
    if queue is None:
        return {"queue_bytes": None, "codel": None}
    values: dict[str, Any] = {}
    if queue.bytes is not None:
        values["queue_bytes"] = queue.bytes
    elif queue.bdp is not None:
        values["queue_bdp"] = queue.bdp
    if "codel" in queue.model_fields_set:
        values["codel"] = CoDel() if queue.codel else None
    return values


def apply_change(
    current: Mapping[Direction, Impairment], directions: Iterable[Direction], change: Change, mtu: int
) -> dict[Direction, Impairment]:
    """The impairments of both directions after a change of some. Raises ValueError where values contradict."""
    chosen = tuple(directions)
    named = dict(change.values)
    rtt_ns = sum(
        named.get("delay_ns", current[way].delay_ns) if way in chosen else current[way].delay_ns for way in DIRECTIONS
    )
    return {way: _changed(current[way], named, rtt_ns, mtu) if way in chosen else current[way] for way in DIRECTIONS}


def _changed(current: Impairment, named: Mapping[str, Any], rtt_ns: int, mtu: int) -> Impairment:
    fields = {name: value for name, value in named.items() if name != "queue_bdp"}
    rate_bps = fields.get("rate_bps", current.rate_bps)
    if rate_bps is None:
        if named.get("queue_bytes") is not None or "queue_bdp" in named or named.get("codel") is not None:
            raise ValueError("queue: a link without a rate has no queue; name a rate too")
        fields["queue_bytes"] = fields["codel"] = None
    elif "queue_bdp" in named:
        fields["queue_bytes"] = int(bdp_bytes(rate_bps, rtt_ns) * named["queue_bdp"])
    elif fields.get("queue_bytes", current.queue_bytes) is None:
        fields["queue_bytes"] = default_queue_bytes(rate_bps, rtt_ns, mtu)
    return replace(current, **fields)
