"""Builds a plan's network with Mininet: hosts, one switch and one border router per datacenter, the WAN links.

Runs inside the sandbox, where Mininet's root namespace is the lab's own. Owns devices, addresses, routes and
kernel settings; knows nothing of workers.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mininet.log import setLogLevel
from mininet.net import Mininet
from mininet.node import Node
from pyroute2.netlink.exceptions import NetlinkError

from testbed.lab import fabric, openvswitch, tuning
from testbed.lab.nodes import Bridge, LabNode, VethLink
from testbed.links import make_link, outage
from testbed.links.base import WanEnd, WanLink
from testbed.links.shaping import gso_cap_bytes
from testbed.machine.netns import netlink_in
from testbed.model.plan import DatacenterPlan, LabPlan, WanPlan

HOST_IFNAME = ROUTER_IFNAME = "eth0"
SHELLS_AT_ONCE = 4


@dataclass
class Network:
    """A built network: the Mininet nodes by role, and the WAN links by name."""

    net: Mininet
    hosts: dict[str, Node] = field(default_factory=dict)
    routers: dict[str, Node] = field(default_factory=dict)  # by datacenter
    wan_nodes: dict[str, Node] = field(default_factory=dict)  # by WAN link
    links: dict[str, WanLink] = field(default_factory=dict)
    endpoints: dict[str, tuple[Node, Node]] = field(default_factory=dict)  # by WAN link; see `endpoints`
    daemons: openvswitch.Daemons | None = None

    def cap_super_packets(self, plan: LabPlan, rates: Mapping[str, int | None]) -> None:
        """After a link's rate has changed: what each host's TCP may hand over at once. `rates` has every link's."""
        netem_rates = {name: rates[name] for name, link in self.links.items() if link.driver == "netem"}
        for host in plan.hosts if netem_rates else ():
            routes = [route for route in plan.routes if route.datacenter == host.datacenter]
            longest = tuning.super_packet_bytes(routes, netem_rates)
            tuning.cap_super_packets(self.hosts[host.name].pid, HOST_IFNAME, longest)
        for name in netem_rates.keys() & self.endpoints.keys():
            for node in self.endpoints[name]:
                longest = gso_cap_bytes(netem_rates[name], self.links[name].plan.mtu)
                tuning.cap_super_packets(node.pid, HOST_IFNAME, longest)

    def pids(self) -> dict[str, int]:
        """A process in the namespaces of every host and router, and one beside the switches."""
        nodes = {**self._routers_by_name(), **self.hosts}
        return {**{name: node.pid for name, node in nodes.items()}, "switch": os.getpid()}

    def _routers_by_name(self) -> dict[str, Node]:
        return {f"router.{datacenter}": node for datacenter, node in self.routers.items()}

    def pid_of(self, name: str) -> int:
        """A process in the namespaces of a host, a datacenter's router (`router.DC`) or a WAN link's node.

        Raises LookupError for a name that is not in the lab, and for one whose shell somebody has killed.
        """
        routers = self._routers_by_name()
        nodes = {**self.wan_nodes, **routers, **self.hosts}
        if name not in nodes:
            raise LookupError(f'no host "{name}" in this lab; there are: {", ".join([*self.hosts, *routers])}')
        if self.is_gone(nodes[name]):
            raise LookupError(f'"{name}" is gone: the shell that held its network was killed; take the lab down and up')
        pid: int = nodes[name].pid
        return pid

    @staticmethod
    def is_gone(node: Node) -> bool:
        """True when the shell that keeps a node's namespaces has ended."""
        return node.shell is None or node.shell.poll() is not None

    def lost(self) -> dict[str, str]:
        """Parts of the lab's network that ended though nobody took the lab down: what it is, and how that shows."""
        found = {
            name: "is gone: the shell that held its network has ended; take the lab down and up again"
            for name, node in {**self._routers_by_name(), **self.hosts}.items()
            if self.is_gone(node)
        }
        for number, datacenter in enumerate(self.routers):
            if not Path(f"/sys/class/net/br{number}").exists():
                found[f"switch of {datacenter}"] = (
                    "is gone: somebody removed its bridge; take the lab down and up again"
                )
        for program in self.daemons.ended() if self.daemons is not None else ():
            found[program] = "has ended: Open vSwitch's switches forward no new flows; take the lab down and up again"
        for name, link in self.links.items():
            # The emulator holds the only descriptors of its devices: they go with it.
            if not all(f" {end.ifname}:" in _devices(end.pid) for end in link.ends):
                found[f"wan {name}"] = (
                    "is broken: its emulator, or a device of it, is gone; take the lab down and up again"
                )
        return found

    def close(self) -> None:
        """End what the drivers started. Devices and namespaces go with the sandbox."""
        for link in self.links.values():
            link.close()


def build(plan: LabPlan, driver: str, run_dir: Path) -> Network:
    """Build everything; returns when every address and route is set. Raises LinkError, OSError, NetlinkError."""
    setLogLevel("error")
    # Mininet's init() raises host-wide limits (fs.file-max and others); nothing outside the lab is touched.
    Mininet.inited = True
    tuning.disable_ipv6()
    net = Mininet(topo=None, build=False, controller=None, switch=Bridge, host=LabNode, link=VethLink)
    daemons = openvswitch.Daemons(run_dir.parent / "ovs")
    network = Network(net, daemons=daemons)
    for number, datacenter in enumerate(plan.datacenters):
        _add_datacenter(network, number, datacenter, daemons)
    net.start()
    for number, wan in enumerate(plan.wans):
        _add_wan(network, number, wan, driver, run_dir, plan.seed + number)
    for number, datacenter in enumerate(plan.datacenters):
        _configure_datacenter(network, datacenter, plan)
        fabric.limit(datacenter, _fabric_ends(network, number, datacenter))
    return network


def _add_datacenter(network: Network, number: int, datacenter: DatacenterPlan, daemons: openvswitch.Daemons) -> None:
    parameters: dict[str, Any] = {"dpid": f"{number + 1:x}", "mtu": datacenter.fabric_mtu}
    if datacenter.switch == "ovs":
        parameters |= {"cls": openvswitch.OpenVSwitch, "daemons": daemons}
    switch = network.net.addSwitch(f"br{number}", **parameters)
    router = network.net.addHost(f"r{number}")
    network.routers[datacenter.name] = router
    network.net.addLink(router, switch, intfName1=ROUTER_IFNAME, intfName2=f"br{number}-r")
    with ThreadPoolExecutor(SHELLS_AT_ONCE) as pool:  # most of the time is waiting for a shell's prompt
        nodes = list(pool.map(network.net.addHost, [f"d{number}h{index}" for index in range(len(datacenter.hosts))]))
    for index, (host, node) in enumerate(zip(datacenter.hosts, nodes, strict=True)):
        network.hosts[host.name] = node
        network.net.addLink(node, switch, intfName1=HOST_IFNAME, intfName2=f"br{number}-h{index}")


def _fabric_ends(network: Network, number: int, datacenter: DatacenterPlan) -> list[tuple[Node, str, str]]:
    """Whoever is at the switch, its interface, and the port that leads to it."""
    ends = [(network.routers[datacenter.name], ROUTER_IFNAME, f"br{number}-r")]
    ends += [
        (network.hosts[host.name], HOST_IFNAME, f"br{number}-h{index}") for index, host in enumerate(datacenter.hosts)
    ]
    return ends


def _add_wan(network: Network, number: int, wan: WanPlan, driver: str, run_dir: Path, seed: int) -> None:
    node = network.net.addHost(f"w{number}")
    network.wan_nodes[wan.name] = node
    ends = (
        WanEnd(network.routers[wan.a].pid, f"wan{number}", wan.address_a),
        WanEnd(network.routers[wan.b].pid, f"wan{number}", wan.address_b),
    )
    link = make_link(driver if wan.driver == "auto" else wan.driver, wan, ends, node.pid, run_dir, seed)
    network.links[wan.name] = link
    link.build()
    for end in ends:
        with suppress(NetlinkError):  # a kernel without it: a timeline with an outage is refused then
            outage.install(end.pid, end.ifname)


def _configure_datacenter(network: Network, datacenter: DatacenterPlan, plan: LabPlan) -> None:
    router = network.routers[datacenter.name]
    _configure_router(network, router, datacenter, plan)
    router_mac = _mac(router, ROUTER_IFNAME)
    routes = [route for route in plan.routes if route.datacenter == datacenter.name]
    subnets = {other.name: other.subnet for other in plan.datacenters}
    wans = {wan.name: wan for wan in plan.wans}
    for host in datacenter.hosts:
        node = network.hosts[host.name]
        with netlink_in(node.pid) as ip:
            eth0 = _up(ip, HOST_IFNAME, str(host.address.ip), host.address.network.prefixlen, datacenter.fabric_mtu)
            gateway = str(datacenter.router_address.ip)
            _static_neighbour(ip, eth0, gateway, router_mac)
            ip.route("add", dst="0.0.0.0/0", gateway=gateway)
            for route in routes:
                metrics = tuning.route_metrics(route, wans[route.links[0]])
                ip.route("add", dst=str(subnets[route.destination]), gateway=gateway, metrics=metrics)
        tuning.tune_host(node.pid, routes)


def _configure_router(network: Network, router: Node, datacenter: DatacenterPlan, plan: LabPlan) -> None:
    with netlink_in(router.pid) as ip:
        address = datacenter.router_address
        eth0 = _up(ip, ROUTER_IFNAME, str(address.ip), address.network.prefixlen, datacenter.fabric_mtu)
        for host in datacenter.hosts:
            _static_neighbour(ip, eth0, str(host.address.ip), _mac(network.hosts[host.name], HOST_IFNAME))
        for route in plan.routes:
            if route.datacenter != datacenter.name:
                continue
            wan = next(wan for wan in plan.wans if wan.name == route.links[0])
            far = wan.address_b if wan.a == datacenter.name else wan.address_a
            subnet = next(other.subnet for other in plan.datacenters if other.name == route.destination)
            ip.route("add", dst=str(subnet), gateway=str(far.ip))
    tuning.tune_router(router.pid)


def _up(ip: Any, ifname: str, address: str, prefixlen: int, mtu: int) -> int:
    """Raise loopback and one interface with its address; returns the interface's index."""
    index: int = ip.link_lookup(ifname=ifname)[0]
    ip.link("set", index=1, state="up")
    ip.link("set", index=index, state="up", mtu=mtu)
    ip.addr("add", index=index, address=address, prefixlen=prefixlen)
    return index


def _static_neighbour(ip: Any, ifindex: int, address: str, mac: str) -> None:
    """Spare the first packets an ARP exchange."""
    ip.neigh("replace", dst=address, lladdr=mac, ifindex=ifindex, state=0x80)  # NUD_PERMANENT


def _devices(pid: int) -> str:
    """/proc/PID/net/dev, one interface a line; empty where the process is gone."""
    try:
        return "".join(f" {line.strip()}\n" for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines())
    except OSError:
        return ""


def _mac(node: Node, ifname: str) -> str:
    mac: str = node.nameToIntf[ifname].mac
    return mac
