"""What the file format has and this version does not do yet. Asked for, it is refused, never ignored.

A feature that gets built loses its entry here, and nothing else has to change.
"""

from collections.abc import Iterator

from testbed.topology.checks.finding import Finding
from testbed.topology.checks.hosts import hosts_of
from testbed.topology.problems import Path
from testbed.topology.salvage import readable
from testbed.topology.schema import TopologyFile

_LATER = "not available in this version of pddbed"


def check_unsupported(file: TopologyFile) -> Iterator[Finding]:
    for path, what, remedy in _asked_for(file):
        yield Finding(path, f"{what} is {_LATER}; {remedy}", at_key=True)


def _asked_for(file: TopologyFile) -> Iterator[tuple[Path, str, str]]:
    """(path, what, what to do instead) of everything that is asked for and not built."""
    if readable(file.datacenters):
        for name, datacenter in file.datacenters.items():
            path: Path = ("datacenters", name)
            if readable(datacenter.fabric.rate) and datacenter.fabric.rate is not None:
                yield (*path, "fabric", "rate"), "a fabric rate", "remove it: it is as fast as this machine"
            if readable(datacenter.fabric.delay) and datacenter.fabric.delay:
                yield (*path, "fabric", "delay"), "a fabric delay", "remove it"
    for path, _, host in hosts_of(file):
        if host.device == "cuda":
            yield (*path, "device"), "device cuda", "write cpu"
