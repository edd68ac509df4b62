"""Subnets that overlap, are too small or belong to something else, and the addresses that hosts ask for."""

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network

from testbed.topology.addresses import WAN_RANGE, capacity, router_address
from testbed.topology.checks.finding import Finding
from testbed.topology.problems import Path
from testbed.topology.salvage import readable
from testbed.topology.schema import Datacenter, TopologyFile

_RESERVED = {
    IPv4Network("0.0.0.0/8"): "this network (RFC 1122)",
    IPv4Network("127.0.0.0/8"): "loopback",
    IPv4Network("169.254.0.0/16"): "link-local addresses",
    IPv4Network("224.0.0.0/4"): "multicast",
    IPv4Network("240.0.0.0/4"): "nothing (class E)",
    WAN_RANGE: "pddbed's own WAN links",
}
_ADVICE = "choose another, such as 10.1.0.0/24"


def check_subnets(file: TopologyFile) -> Iterator[Finding]:
    if not readable(file.datacenters):
        return
    known: list[tuple[str, IPv4Network]] = []
    for name, datacenter in file.datacenters.items():
        if not readable(datacenter.subnet):
            continue
        path: Path = ("datacenters", name, "subnet")
        subnet = datacenter.subnet
        for other, taken in known:
            if subnet.overlaps(taken):
                yield Finding(path, f'"{subnet}" overlaps {taken} of datacenter "{other}"; {_ADVICE}')
        for reserved, use in _RESERVED.items():
            if subnet.overlaps(reserved):
                yield Finding(path, f'"{subnet}" overlaps {reserved}, which is for {use}; {_ADVICE}')
                break
        known.append((name, subnet))
        if readable(datacenter.hosts):
            yield from _hosts(path, datacenter)


def _hosts(path: Path, datacenter: Datacenter) -> Iterator[Finding]:
    subnet, hosts = datacenter.subnet, datacenter.hosts
    if len(hosts) > capacity(subnet) or subnet.prefixlen > 30:
        prefix = 30
        while 2 ** (32 - prefix) - 3 < len(hosts):
            prefix -= 1
        what = f"a border router and {len(hosts)} host{'' if len(hosts) == 1 else 's'}"
        yield Finding(path, f'"{subnet}" is too small for {what}; use a /{prefix}')
    owners: dict[IPv4Address, str] = {}
    for name, host in hosts.items():
        if not readable(host.address) or host.address is None:
            continue
        place = (*path[:-1], "hosts", name, "address")
        problem = _misplaced(host.address, subnet)
        if problem is None and host.address in owners:
            problem = f'belongs to host "{owners[host.address]}" already'
        owners.setdefault(host.address, name)
        if problem is not None:
            yield Finding(place, f'"{host.address}" {problem}; choose another of {subnet}, or leave it out')


def _misplaced(address: IPv4Address, subnet: IPv4Network) -> str | None:
    if address not in subnet:
        return f"is not in {subnet}"
    if address == router_address(subnet):
        return "is the border router's"
    if address == subnet.network_address:
        return "is the subnet's own"
    return "is the subnet's broadcast address" if address == subnet.broadcast_address else None
