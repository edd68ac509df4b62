"""What the file format has and this version does not do yet. Asked for, it is refused, never ignored.

A feature that gets built loses its entry here, and nothing else has to change.
"""

from collections.abc import Iterator
from typing import Any

from testbed.links.base import DIRECTIONS
from testbed.topology.checks.finding import Finding
from testbed.topology.checks.hosts import hosts_of
from testbed.topology.directions import effective
from testbed.topology.problems import Path
from testbed.topology.salvage import readable
from testbed.topology.schema import GilbertElliott, Jitter, TopologyFile
from testbed.units import quote

# Keys of a WAN direction that neither driver acts on yet.
UNBUILT_IMPAIRMENTS = ("jitter", "loss", "duplicate", "corrupt", "reorder")
_LATER = "not available in this version of pddbed"


def check_unsupported(file: TopologyFile) -> Iterator[Finding]:
    for path, what, remedy in _asked_for(file):
        yield Finding(path, f"{what} is {_LATER}; {remedy}", at_key=True)


def _asked_for(file: TopologyFile) -> Iterator[tuple[Path, str, str]]:
    """(path, what, what to do instead) of everything that is asked for and not built."""
    if readable(file.congestion) and file.congestion:
        yield ("congestion",), "a congestion timeline", "remove it"
    if readable(file.scale) and file.scale:
        yield ("scale",), "a scale model", "remove it"
    if readable(file.datacenters):
        for name, datacenter in file.datacenters.items():
            path: Path = ("datacenters", name)
            if datacenter.switch == "ovs":
                yield (*path, "switch"), "an Open vSwitch", "write linux-bridge"
            if readable(datacenter.fabric.rate) and datacenter.fabric.rate is not None:
                yield (*path, "fabric", "rate"), "a fabric rate", "remove it: it is as fast as this machine"
            if readable(datacenter.fabric.delay) and datacenter.fabric.delay:
                yield (*path, "fabric", "delay"), "a fabric delay", "remove it"
    for path, _, host in hosts_of(file):
        if host.device == "cuda":
            yield (*path, "device"), "device cuda", "write cpu"
        if readable(host.profile) and host.profile not in (None, "native"):
            yield (*path, "profile"), f"profile {quote(host.profile)}", "write native"
    yield from _impairments(file)
    if file.serving.handoff in ("catch-up", "overlap", "kv"):
        yield ("serving", "handoff"), f"hand-over {file.serving.handoff}", "write auto or one-shot"
    if file.serving.kv_send == "chunked":
        yield ("serving", "kv_send"), "kv_send chunked", "write after-prefill"


def _impairments(file: TopologyFile) -> Iterator[tuple[Path, str, str]]:
    """What the schema and the plan know, and no driver does yet. Asking for 0% of it is fine."""
    if not readable(file.wan):
        return
    for index, wan in enumerate(file.wan):
        for name in DIRECTIONS:
            direction = effective(wan, index, name)
            for key in UNBUILT_IMPAIRMENTS:
                if readable(direction[key]) and _asks_for_something(direction[key]):
                    yield direction.paths[key], key, "remove it"
            queue = direction["queue"]
            if queue is not None and queue.codel is True:
                yield (*direction.paths["queue"], "codel"), "codel", "remove it"


def _asks_for_something(value: Any) -> bool:
    if isinstance(value, Jitter):
        return value.std > 0
    if isinstance(value, GilbertElliott):
        return value.good_to_bad * value.loss_bad + value.loss_good > 0
    return bool(value)
