"""Addresses of routers, hosts and WAN ends. Pure and deterministic: equal files, equal addresses.

A datacenter's border router has the subnet's first usable address; hosts follow in the order of the file, around
the addresses that hosts ask for. WAN link number i has the i-th /31 (RFC 3021) of a range of its own.
"""

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

WAN_RANGE = IPv4Network("172.31.0.0/16")
WAN_PREFIX = 31


def router_address(subnet: IPv4Network) -> IPv4Address:
    """The first usable address."""
    return subnet.network_address + 1


def capacity(subnet: IPv4Network) -> int:
    """Number of hosts that fit: all addresses but network, broadcast and router."""
    return max(0, subnet.num_addresses - 3)


def assign_hosts(subnet: IPv4Network, hosts: Mapping[str, IPv4Address | None]) -> dict[str, IPv4Interface]:
    """An interface for each host; None takes the next free address. `hosts` must fit."""
    wanted = {address for address in hosts.values() if address is not None}
    free = _free(subnet, wanted)
    return {
        name: IPv4Interface((address if address is not None else next(free), subnet.prefixlen))
        for name, address in hosts.items()
    }


def _free(subnet: IPv4Network, taken: Iterable[IPv4Address]) -> Iterator[IPv4Address]:
    used = {router_address(subnet), *taken}
    return (address for address in subnet.hosts() if address not in used)


def wan_addresses(index: int) -> tuple[IPv4Interface, IPv4Interface]:
    """Both ends of WAN link number `index`: the first datacenter's router, the second's."""
    first = WAN_RANGE.network_address + 2 * index
    return IPv4Interface((first, WAN_PREFIX)), IPv4Interface((first + 1, WAN_PREFIX))
