"""A datacenter's fabric, where its file limits it: a rate for what every host sends and receives, a delay to everyone.

    host eth0: tbf (rate) -> switch port of the receiver: tbf (rate), or netem (delay, rate)

The border router is a host of its fabric. Without `rate` and `delay` nothing is installed, and the fabric is as fast as
this machine. It is a ceiling: its queues are short and drop, as a switch's do, and nobody judges it (see `verify`).
"""

import errno
import os

from mininet.node import Node
from pyroute2.netlink.exceptions import NetlinkError

from testbed.links import qdisc
from testbed.links.base import LinkError
from testbed.links.segment import index_of
from testbed.links.shaping import ORDERING_BYTES_PER_S, TIMER_LATENESS_NS, delay_line_packets, gso_cap_bytes
from testbed.links.tc_messages import open_netlink
from testbed.model.impairment import NS_PER_S, Impairment
from testbed.model.plan import DatacenterPlan

QUEUE_NS = 2_000_000
LEAST_QUEUE_BYTES = 256 * 1024


def limiter(rate_bps: int, mtu: int) -> qdisc.Tbf:
    """The ceiling of one port: bursts of a millisecond, and a queue of two or of 256 KiB, whichever is more.

    Raises ValueError for a rate at which the kernel cannot count the time of a packet.
    """
    rate = -(-rate_bps // 8)
    burst = gso_cap_bytes(rate_bps, mtu) + qdisc.ETHERNET_HEADER_BYTES + rate * TIMER_LATENESS_NS // NS_PER_S
    if burst * NS_PER_S // rate // qdisc.TICK_NS > qdisc.U32_MAX:
        raise ValueError(f"packets of {mtu} bytes take too long at {rate_bps} bit/s; raise its rate or lower its mtu")
    return qdisc.Tbf(rate, burst, max(LEAST_QUEUE_BYTES, rate * QUEUE_NS // NS_PER_S), mtu)


def delay_line(rate_bps: int | None, delay_ns: int) -> qdisc.Netem:
    """The delay of one port, behind which packets keep their order; at the fabric's rate, if it has one."""
    packets = delay_line_packets(Impairment(rate_bps=rate_bps, delay_ns=delay_ns))
    rate = ORDERING_BYTES_PER_S if rate_bps is None else -(-rate_bps // 8)
    return qdisc.Netem(delay_ns, min(packets, qdisc.U32_MAX), rate)


def limit(datacenter: DatacenterPlan, ends: list[tuple[Node, str, str]]) -> None:
    """`ends`: each host and the router, its own interface, and the port of the switch that leads to it.

    Raises LinkError.
    """
    rate_bps, delay_ns, mtu = datacenter.fabric_rate_bps, datacenter.fabric_delay_ns, datacenter.fabric_mtu
    try:
        tbf = None if rate_bps is None else limiter(rate_bps, mtu)
        at_port = delay_line(rate_bps, delay_ns) if delay_ns else tbf
        for node, ifname, _ in ends:
            if tbf is not None:
                with open_netlink(node.pid) as netlink:
                    qdisc.install(netlink, index_of(netlink, ifname), tbf, mtu, False)
        if at_port is not None:
            with open_netlink(os.getpid()) as switch:  # its ports are in the lab's own root namespace
                for _, _, port in ends:
                    qdisc.install(switch, index_of(switch, port), at_port, mtu, False)
    except ValueError as error:
        raise LinkError(f'datacenter "{datacenter.name}": fabric: {error}') from None
    except NetlinkError as error:
        reason = "it lacks sch_tbf or sch_netem" if error.code == errno.ENOENT else os.strerror(error.code)
        raise LinkError(f'datacenter "{datacenter.name}": the kernel cannot limit the fabric: {reason}') from error
