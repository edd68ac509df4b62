"""Measuring and cross traffic need hosts of their own at both ends of a WAN link: made on first use, then kept.

Each end is a Mininet node behind its border router, and its packets to the other end take exactly this link, however
the datacenters' own routes run. Owns the upper half of the WAN range, four addresses per link.

    end a (.1) -- (.0) router of a ==== WAN link ==== router of b (.2) -- (.3) end b
"""

import threading
from dataclasses import dataclass
from ipaddress import IPv4Address

from mininet.node import Node

from testbed.lab import tuning
from testbed.lab.network import HOST_IFNAME, Network
from testbed.machine.netns import netlink_in
from testbed.model.plan import LabPlan, RoutePlan, WanPlan

FIRST_ADDRESS = IPv4Address("172.31.128.0")
FABRIC_MTU = 9000
_MAKING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end: a process in its namespaces, and its address."""

    pid: int
    address: IPv4Address


def endpoints(plan: LabPlan, network: Network, link: str) -> tuple[Endpoint, Endpoint]:
    """The two ends of a WAN link, in the order of `between`. Raises LookupError for an unknown link."""
    names = [wan.name for wan in plan.wans]
    if link not in names:
        raise LookupError(f'no WAN link "{link}" in this lab; there are: {", ".join(names)}')
    number = names.index(link)
    wan = plan.wans[number]
    with _MAKING:
        if link not in network.endpoints:
            network.endpoints[link] = _make(network, wan, number)
    node_a, node_b = network.endpoints[link]
    first = FIRST_ADDRESS + 4 * number
    return Endpoint(node_a.pid, first + 1), Endpoint(node_b.pid, first + 3)


def _make(network: Network, wan: WanPlan, number: int) -> tuple[Node, Node]:
    first = FIRST_ADDRESS + 4 * number
    nodes = []
    for side, (datacenter, own, far_end, far_router) in enumerate(
        ((wan.a, first, first + 3, wan.address_b), (wan.b, first + 2, first + 1, wan.address_a))
    ):
        router = network.routers[datacenter]
        node = network.net.addHost(f"e{number}{'ab'[side]}")
        ifname = f"end{number}"
        link = network.net.addLink(node, router, intfName1=HOST_IFNAME, intfName2=ifname)
        with netlink_in(router.pid) as ip:
            index = ip.link_lookup(ifname=ifname)[0]
            ip.link("set", index=index, mtu=FABRIC_MTU, state="up")
            ip.addr("add", index=index, address=str(own), prefixlen=31)
            ip.neigh("replace", dst=str(own + 1), lladdr=link.intf1.mac, ifindex=index, state=0x80)
            ip.route("add", dst=f"{far_end}/32", gateway=str(far_router.ip))
        with netlink_in(node.pid) as ip:
            index = ip.link_lookup(ifname=HOST_IFNAME)[0]
            ip.link("set", index=1, state="up")
            ip.link("set", index=index, mtu=FABRIC_MTU, state="up")
            ip.addr("add", index=index, address=str(own + 1), prefixlen=31)
            ip.neigh("replace", dst=str(own), lladdr=link.intf2.mac, ifindex=index, state=0x80)
            rate_bps = wan.forward.rate_bps if side == 0 else wan.backward.rate_bps
            route = RoutePlan(datacenter, "", (wan.name,), wan.rtt_ns, rate_bps, wan.mtu)
            ip.route("add", dst="0.0.0.0/0", gateway=str(own), metrics=tuning.route_metrics(route, wan))
        tuning.tune_host(node.pid, [route])
        if network.links[wan.name].driver == "netem":
            tuning.cap_super_packets(node.pid, HOST_IFNAME, tuning.super_packet_bytes([route], {wan.name: rate_bps}))
        nodes.append(node)
    return nodes[0], nodes[1]
