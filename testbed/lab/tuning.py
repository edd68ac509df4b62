"""Kernel settings of the lab's namespaces: TCP buffers from the bandwidth-delay product, forwarding, no IPv6.

Every setting here is per network namespace; nothing of the machine changes.
"""

import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from testbed.links.shaping import gso_cap_bytes
from testbed.machine.netns import netlink_in, network_namespace_of
from testbed.model.impairment import bdp_bytes
from testbed.model.plan import RoutePlan, WanPlan

MIN_TCP_BUFFER = 64 * 1024 * 1024  # room for a link that `wan set` makes faster or longer; the kernel grows into it
MAX_TCP_BUFFER = 2**31 - 1  # tcp_rmem and tcp_wmem are ints
UNLIMITED_RATE_BPS = 10_000_000_000  # what buffers are sized for on a link without a rate limit


def disable_ipv6(settings: Path = Path("/proc/sys/net/ipv6/conf")) -> None:
    """Labs are IPv4 only: router solicitations and DAD would put packets on the links that nobody asked for."""
    for name in ("all", "default"):
        setting = settings / name / "disable_ipv6"
        if setting.exists():
            setting.write_text("1")


def _write(settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        (Path("/proc/sys/net") / name).write_text(value)


def tcp_buffer_bytes(route: RoutePlan) -> int:
    """Largest socket buffer for a path: three BDPs, since the kernel counts its own overhead against the limit."""
    rate_bps = route.rate_bps or UNLIMITED_RATE_BPS
    return min(MAX_TCP_BUFFER, max(MIN_TCP_BUFFER, 3 * bdp_bytes(rate_bps, route.rtt_ns)))


def tune_host(pid: int, routes: Iterable[RoutePlan]) -> None:
    """A host sends and receives at the rate of its slowest, longest path without waiting for a window."""
    largest = max((tcp_buffer_bytes(route) for route in routes), default=MIN_TCP_BUFFER)
    with network_namespace_of(pid):
        disable_ipv6()
        _write(
            {
                "ipv4/tcp_rmem": f"4096 131072 {largest}",
                "ipv4/tcp_wmem": f"4096 65536 {largest}",
                "ipv4/tcp_slow_start_after_idle": "0",
                "ipv4/tcp_no_metrics_save": "1",  # one run's congestion must not shape the next
            }
        )


def tune_router(pid: int) -> None:
    with network_namespace_of(pid):
        disable_ipv6()
        _write({"ipv4/ip_forward": "1", "ipv4/conf/all/send_redirects": "0"})


def super_packet_bytes(routes: Iterable[RoutePlan], netem_rates: Mapping[str, int | None]) -> int | None:
    """The longest super-packet a host may send, where some path of it crosses a netem link; None: the kernel's own.

    To netem a super-packet is one packet, so it must be short against the bottleneck's rate. `netem_rates` has the
    rate in bit/s of each link with that driver.
    """
    crossed = [(netem_rates[link], route.mtu) for route in routes for link in route.links if link in netem_rates]
    return min((gso_cap_bytes(rate_bps, mtu) for rate_bps, mtu in crossed), default=None)


def cap_super_packets(pid: int, ifname: str, longest_bytes: int | None) -> None:
    """Limit what the host's TCP hands to its interface at once."""
    if longest_bytes is None:
        return
    with netlink_in(pid) as ip:
        ip.link("set", index=ip.link_lookup(ifname=ifname)[0], gso_max_size=longest_bytes)


def applied(pid: int, ifname: str) -> dict[str, Any]:
    """Kernel settings of a host as they really are, read back from its namespace."""
    with network_namespace_of(pid):
        settings = {name: (Path("/proc/sys/net/ipv4") / name).read_text().split() for name in ("tcp_rmem", "tcp_wmem")}
        idle = (Path("/proc/sys/net/ipv4") / "tcp_slow_start_after_idle").read_text().strip()
    with netlink_in(pid) as ip:
        (link,) = ip.link("get", ifname=ifname)
        metrics = [route.get_attr("RTA_METRICS") for route in ip.get_routes(family=socket.AF_INET)]
    return {
        "mtu": link.get_attr("IFLA_MTU"),
        "gso_max_bytes": link.get_attr("IFLA_GSO_MAX_SIZE"),
        "tcp_receive_buffer_max_bytes": int(settings["tcp_rmem"][2]),
        "tcp_send_buffer_max_bytes": int(settings["tcp_wmem"][2]),
        "tcp_slow_start_after_idle": idle == "1",
        "wan_congestion_control": sorted({metric.get_attr("RTAX_CC_ALGO") for metric in metrics if metric}),
    }


def route_metrics(route: RoutePlan, wan: WanPlan) -> dict[str, Any]:
    """Per-route TCP: the WAN's MTU (hosts have jumbo frames), congestion control and initial window.

    The congestion control goes on the route because the sysctl is refused in a namespace when the machine does
    not list the algorithm in tcp_allowed_congestion_control.
    """
    return {
        "mtu": route.mtu,
        "cc_algo": wan.congestion,
        "initcwnd": wan.initial_window,
    }
