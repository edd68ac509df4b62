"""Names that must differ: hosts across the whole lab, WAN links, and border routers.

Hosts share their names with all of these: `pddbed exec` takes any of them, /etc/hosts has the routers too.
"""

from collections.abc import Iterator

from testbed.model.units import quote
from testbed.topology.checks.finding import Finding
from testbed.topology.names import lookup_key
from testbed.topology.problems import Path, dotted
from testbed.topology.salvage import readable
from testbed.topology.schema import TopologyFile


def check_names(file: TopologyFile) -> Iterator[Finding]:
    yield from _hosts(file)
    yield from _wans(file)


def wan_name(file: TopologyFile, index: int) -> str:
    """The name of a WAN link, given or by position."""
    name = file.wan[index].name
    return f"wan{index}" if name is None else name


def _hosts(file: TopologyFile) -> Iterator[Finding]:
    if not readable(file.datacenters):
        return
    taken: dict[str, tuple[str, str]] = {
        lookup_key(f"router.{name}"): (f"router.{name}", f'the border router of "{name}"') for name in file.datacenters
    }
    if readable(file.wan):
        links = [(wan_name(file, index), index) for index, wan in enumerate(file.wan) if readable(wan.name)]
        taken.update({lookup_key(name): (name, f"wan[{index}]") for name, index in reversed(links)})
    for name, datacenter in file.datacenters.items():
        if not readable(datacenter.hosts):
            continue
        for host in datacenter.hosts:
            path: Path = ("datacenters", name, "hosts", host)
            other, owner = taken.setdefault(lookup_key(host), (host, dotted(path)))
            if owner == dotted(path):
                continue
            reason = "is the name of" if other == host else f"cannot be told from {quote(other)} by a resolver,"
            yield Finding(path, f"{quote(host)} {reason} {owner}; choose another", at_key=True)


def _wans(file: TopologyFile) -> Iterator[Finding]:
    if not readable(file.wan):
        return
    taken: dict[str, int] = {}
    for index, wan in enumerate(file.wan):
        if not readable(wan.name):
            continue
        first = taken.setdefault(wan_name(file, index), index)
        if first != index:
            path: Path = ("wan", index) if wan.name is None else ("wan", index, "name")
            yield Finding(path, f"{quote(wan_name(file, index))} is the name of wan[{first}] too; choose another")
