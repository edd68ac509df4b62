"""Refusals of the driver that a link names. Links that leave it open (`auto`) get one that can, on the machine."""

from collections.abc import Iterator

from testbed.model.direction import DIRECTIONS
from testbed.model.drivers import refusal
from testbed.model.impairment import Impairment
from testbed.topology.checks.finding import Finding
from testbed.topology.directions import Effective, effective, impairment, rtt_ns
from testbed.topology.problems import Path
from testbed.topology.salvage import readable
from testbed.topology.schema import TopologyFile, Wan


def check_drivers(file: TopologyFile) -> Iterator[Finding]:
    if not readable(file.wan):
        return
    for index, wan in enumerate(file.wan):
        if not readable(wan.driver) or wan.driver == "auto":
            continue
        for direction, value in _impairments(index, wan):
            refused = refusal(wan.driver, value, wan.mtu)
            if refused is not None:
                key, _, reason = refused.partition(": ")
                label = f"{direction.name}: " if wan.forward is not None or wan.backward is not None else ""
                yield Finding(_path(direction, key, ("wan", index)), label + reason)


def _impairments(index: int, wan: Wan) -> Iterator[tuple[Effective, Impairment]]:
    """Both directions as they would be asked of the driver; none where a value is unreadable or contradicts."""
    directions = [effective(wan, index, name) for name in DIRECTIONS]
    rtt = rtt_ns(*directions)
    for direction in directions:
        if rtt is None or not readable(*direction.values.values(), wan.mtu):
            continue
        try:
            yield direction, impairment(direction, rtt, wan.mtu)
        except ValueError:
            continue


def _path(direction: Effective, key: str, link: Path) -> Path:
    """Path of the refused value; a derived one (the default queue) has none."""
    if key == "codel":
        return (*direction.paths["queue"], "codel")
    return direction.paths.get(key, link)
