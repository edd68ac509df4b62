"""Facts about the links that a timeline changes, from a topology file or from a running lab."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from testbed.impairment import Impairment
from testbed.links.base import DIRECTIONS, Direction
from testbed.topology.checks.names import wan_name
from testbed.topology.directions import effective, impairment, rtt_ns
from testbed.topology.plan import WanPlan
from testbed.topology.salvage import readable
from testbed.topology.schema import TopologyFile

# More than a relay in userspace has carried on any machine; above the second, tbf's whole nanoseconds are too coarse.
_MAX_RATE_BPS = {"userspace": 20_000_000_000, "netem": 100_000_000_000}


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
