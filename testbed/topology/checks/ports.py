"""Ports on this machine that two things would listen on: `publish` of any host, and the API."""

from collections.abc import Iterator

from testbed.model.plan import Publish
from testbed.topology.checks.finding import Finding
from testbed.topology.checks.hosts import hosts_of
from testbed.topology.problems import Path, dotted
from testbed.topology.salvage import readable
from testbed.topology.schema import TopologyFile

_ANY = "0.0.0.0"


def check_ports(file: TopologyFile) -> Iterator[Finding]:
    taken: list[tuple[str, int, str]] = []  # address, port, who
    if any(host.role == "gateway" for _, _, host in hosts_of(file)) and readable(file.api.listen):
        taken.append((*file.api.listen, "the API (api.listen)"))
    for path, publish in _published(file):
        for address, port, owner in taken:
            if port == publish.listen_port and (
                address == publish.listen_address or _ANY in (address, publish.listen_address)
            ):
                yield Finding(path, f"port {port} on this machine is taken by {owner}; choose another")
                break
        else:
            taken.append((publish.listen_address, publish.listen_port, dotted(path)))


def _published(file: TopologyFile) -> Iterator[tuple[Path, Publish]]:
    for path, _, host in hosts_of(file):
        if readable(host.publish):
            for index, publish in enumerate(host.publish):
                yield (*path, "publish", index), publish
