"""A datacenter's fabric, where its file limits it: a rate for what every host sends and receives, a delay to everyone.

    host eth0: tbf (rate) -> switch port of the receiver: netem (delay), then tbf (rate)

The border router is a host of its fabric. Without `rate` and `delay` nothing is installed, and the fabric is as fast as
this machine. It is a ceiling: its queues are short and drop, as a switch's do, and nobody judges it (see `verify`).
"""

import errno
import os
from typing import Any

from mininet.node import Node
from pyroute2.netlink.exceptions import NetlinkError

from testbed.impairment import NS_PER_S, Impairment
from testbed.links import qdisc
from testbed.links.base import LinkError
from testbed.links.segment import index_of
from testbed.links.shaping import ORDERING_BYTES_PER_S, TIMER_LATENESS_NS, delay_line_packets, gso_cap_bytes
from testbed.links.tc_messages import open_netlink
from testbed.topology.plan import DatacenterPlan

QUEUE_NS = 2_000_000
LEAST_QUEUE_BYTES = 256 * 1024
BELOW_NETEM = 0x20000  # 2:, the tbf of a switch port that has a delay


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
    """The delay of one port, in which packets keep their order."""
    packets = delay_line_packets(Impairment(rate_bps=rate_bps, delay_ns=delay_ns))
    return qdisc.Netem(delay_ns, min(packets, qdisc.U32_MAX), ORDERING_BYTES_PER_S)


def limit(datacenter: DatacenterPlan, ends: list[tuple[Node, str, str]]) -> None:
    """`ends`: each host and the router, its own interface, and the port of the switch that leads to it.

    Raises LinkError.
    """
    rate_bps, delay_ns, mtu = datacenter.fabric_rate_bps, datacenter.fabric_delay_ns, datacenter.fabric_mtu
    try:
        tbf = None if rate_bps is None else limiter(rate_bps, mtu)
        for node, ifname, _ in ends:
            if tbf is not None:
                with open_netlink(node.pid) as netlink:
                    qdisc.install(netlink, index_of(netlink, ifname), tbf, mtu, False)
        if tbf is None and not delay_ns:
            return
        with open_netlink(os.getpid()) as switch:  # its ports are in the lab's own root namespace
            for _, _, port in ends:
                _limit_port(switch, index_of(switch, port), tbf, rate_bps, delay_ns, mtu)
    except ValueError as error:
        raise LinkError(f'datacenter "{datacenter.name}": fabric: {error}') from None
    except NetlinkError as error:
        reason = "it lacks sch_tbf or sch_netem" if error.code == errno.ENOENT else error.args[-1]
        raise LinkError(f'datacenter "{datacenter.name}": the kernel cannot limit the fabric: {reason}') from error


def _limit_port(switch: Any, index: int, tbf: qdisc.Tbf | None, rate_bps: int | None, delay_ns: int, mtu: int) -> None:
    """Towards a host."""
    if delay_ns:
        qdisc.install(switch, index, delay_line(rate_bps, delay_ns), mtu, False)
    if tbf is None:
        return
    if delay_ns:
        qdisc.install(switch, index, tbf, mtu, False, parent=qdisc.ROOT_HANDLE | 1, handle=BELOW_NETEM)
    else:
        qdisc.install(switch, index, tbf, mtu, False)
