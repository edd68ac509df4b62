"""The devices of a netem link: two veth pairs and a bridge that carries frames between them, nothing else.

Owns their names in the link's node and their settings (no IPv6, no spanning tree, no snooping, neighbours known for
good); knows no impairment. The bridge is invisible to the routers, which see one /31 network.
"""

from pathlib import Path
from typing import Any

from testbed.links.base import WanEnd
from testbed.links.tc_messages import open_netlink
from testbed.machine.netns import network_namespace_of
from testbed.model.direction import Direction

BRIDGE = "wan"
# The port at which a direction leaves the node.
PORTS: dict[Direction, str] = {"forward": "port-b", "backward": "port-a"}
GSO_SEGMENTS = 65_535  # the kernel's default: super-packets pass whole


def build(mtu: int, ends: tuple[WanEnd, WanEnd], node_pid: int) -> None:
    """Make bridge, ports and both ends; addressed, up, each end's neighbour entered. Raises NetlinkError, OSError."""
    _sysctl(node_pid, "net/ipv6/conf/all/disable_ipv6", "1")
    _sysctl(node_pid, "net/ipv6/conf/default/disable_ipv6", "1")
    with open_netlink(node_pid) as node:
        node.link(
            "add",
            ifname=BRIDGE,
            kind="bridge",
            mtu=mtu,
            br_stp_state=0,
            br_forward_delay=0,
            br_mcast_snooping=0,
        )
        for port, end in zip(("port-a", "port-b"), ends, strict=True):
            peer = {"ifname": end.ifname, "mtu": mtu, "net_ns_pid": end.pid}
            node.link("add", ifname=port, kind="veth", mtu=mtu, peer=peer)
            node.link("set", index=index_of(node, port), master=index_of(node, BRIDGE))
    addresses = [_raise_end(end) for end in ends]
    with open_netlink(node_pid) as node:
        for name in ("port-a", "port-b", BRIDGE):
            node.link("set", index=index_of(node, name), state="up")
    for end, other, link_address in zip(ends, reversed(ends), reversed(addresses), strict=True):
        with open_netlink(end.pid) as netlink:
            # ARP would have to cross the link, and give up after 3 s.
            netlink.neigh(
                "replace",
                dst=str(other.address.ip),
                lladdr=link_address,
                ifindex=index_of(netlink, end.ifname),
                state="permanent",
            )


def index_of(netlink: Any, name: str) -> int:
    """An interface's index in the namespace of the socket. Raises OSError."""
    found = netlink.link_lookup(ifname=name)
    if not found:
        raise OSError(f"interface {name} is gone")
    return int(found[0])


def dropped(netlink: Any, index: int) -> int:
    """Packets that the device itself dropped, on the way in or out; a qdisc's drops are not among them."""
    statistics = netlink.get_links(index)[0].get_attr("IFLA_STATS64")
    return int(statistics["tx_dropped"] + statistics["rx_dropped"])


def _raise_end(end: WanEnd) -> str:
    """Address an end and bring it up; returns its link-layer address."""
    _sysctl(end.pid, f"net/ipv6/conf/{end.ifname}/disable_ipv6", "1")
    with open_netlink(end.pid) as netlink:
        index = index_of(netlink, end.ifname)
        netlink.addr("add", index=index, address=str(end.address.ip), prefixlen=end.address.network.prefixlen)
        netlink.link("set", index=index, state="up")
        return str(netlink.get_links(index)[0].get_attr("IFLA_ADDRESS"))


def _sysctl(pid: int, path: str, value: str) -> None:
    """Write a network setting of `pid`'s namespace, where it exists (IPv6 may be compiled out)."""
    with network_namespace_of(pid):
        file = Path("/proc/sys", path)
        if file.exists():
            file.write_text(value)
