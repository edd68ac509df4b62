"""The filter in front of one direction of a WAN link that makes an outage: new arrivals are dropped, the rest goes on.

Works with either driver: it stands at the egress of the border router's WAN interface, before queue, delay line and
emulator (kernel: net/core/dev.c, sch_handle_egress), as one instruction of classic BPF that says drop. No module beyond
cls_bpf is needed, and no privilege beyond the namespace's own. Owns the netlink messages and the count of what was
dropped, in packets of the MTU (the kernel counts the segments of a super-packet) and in bytes.
"""

import os
import socket
import struct
from dataclasses import dataclass

from pyroute2.netlink.exceptions import NetlinkError

from testbed.machine.netns import netlink_in, network_namespace_of

_CLSACT_EGRESS = 0xFFFFFFF3
_RTM_GETQDISC, _RTM_NEWTFILTER, _RTM_DELTFILTER, _NLMSG_ERROR, _NLMSG_DONE = 38, 44, 45, 2, 3
_REQUEST, _ACK, _EXCL, _CREATE, _DUMP = 1, 4, 0x200, 0x400, 0x300
_TCA_KIND, _TCA_OPTIONS = 1, 2
_TCA_BPF_OPS_LEN, _TCA_BPF_OPS, _TCA_BPF_FLAGS, _ACT_DIRECT = 4, 5, 8, 1
_RETURN_SHOT = struct.pack("=HBBI", 0x06, 0, 0, 2)  # BPF_RET | BPF_K, TC_ACT_SHOT
_ETH_P_ALL = 3


@dataclass(frozen=True, slots=True)
class Statistics:
    """The kernel's counters at a filter."""

    packets: int  # of the MTU
    bytes: int
    drops: int  # a super-packet is one

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(self.packets + other.packets, self.bytes + other.bytes, self.drops + other.drops)

    def __sub__(self, other: "Statistics") -> "Statistics":
        return Statistics(self.packets - other.packets, self.bytes - other.bytes, self.drops - other.drops)


class FilterError(Exception):
    """A filter cannot be set up or changed; the message says where."""


def install(pid: int, ifname: str) -> None:
    """Make room for a filter, before there is traffic: adding it takes the interface's queue away for a moment, and
    what is sent in that moment is lost (kernel: qdisc_graft calls dev_deactivate). Raises NetlinkError.
    """
    with netlink_in(pid) as netlink:
        index = netlink.link_lookup(ifname=ifname)[0]
        if not any(qdisc.get_attr("TCA_KIND") == "clsact" for qdisc in netlink.get_qdiscs(index)):
            netlink.tc("add", "clsact", index)


class OutageFilter:
    """The filter of one interface that `install` was called for. Cuts nest: it heals with the last of them."""

    def __init__(self, pid: int, ifname: str) -> None:
        """`pid` is any process in the border router's network namespace. Raises FilterError."""
        self._ifname = ifname
        self._cuts = 0
        self._passed = Statistics(0, 0, 0)  # counted by the kernel and yet let through, at cuts that are over
        self._cutting = (Statistics(0, 0, 0), Statistics(0, 0, 0))  # before and right after the latest cut
        self._healing = Statistics(0, 0, 0)  # counted while the latest cut was taken back
        self.counted = (0, 0)  # when it was last looked at; nothing is dropped between cuts
        try:
            install(pid, ifname)
            with netlink_in(pid) as netlink:
                self._index = netlink.link_lookup(ifname=ifname)[0]
        except (IndexError, NetlinkError) as error:
            raise FilterError(f"no gate can be set up at {ifname}: {error}") from error
        with network_namespace_of(pid):
            self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        self._netlink.bind((0, 0))
        self._netlink.settimeout(5)
        self.count()

    @property
    def is_cut(self) -> bool:
        return self._cuts > 0

    def cut(self) -> None:
        """New arrivals are dropped from now on. Raises FilterError."""
        if self._cuts:
            self.count()  # what was dropped until now belongs to the cuts before
        else:
            options = (
                _attribute(_TCA_BPF_OPS_LEN, struct.pack("=H", 1))
                + _attribute(_TCA_BPF_OPS, _RETURN_SHOT)
                + _attribute(_TCA_BPF_FLAGS, struct.pack("=I", _ACT_DIRECT))
            )
            before = self._statistics()
            self._passed += let_through(*self._cutting, self._healing, before)
            self._healing = Statistics(0, 0, 0)
            self._request(_RTM_NEWTFILTER, _REQUEST | _ACK | _CREATE | _EXCL, _attribute(_TCA_OPTIONS, options))
            self._cutting = (before, self._statistics())
        self._cuts += 1

    def heal(self) -> None:
        """One cut less. Raises FilterError."""
        if self._cuts == 1:
            before = self._statistics()
            self._request(_RTM_DELTFILTER, _REQUEST | _ACK)
            self._healing = self._statistics() - before
        self._cuts = max(0, self._cuts - 1)

    def count(self) -> tuple[int, int]:
        """(packets, bytes) dropped since the interface was made; bytes count what it would have sent."""
        seen = self._statistics()
        dropped = seen - self._passed - let_through(*self._cutting, self._healing, seen)
        self.counted = (dropped.packets, dropped.bytes)
        return self.counted

    def _statistics(self) -> Statistics:
        """The kernel's counters, read in the shortest way: packets go on meanwhile."""
        from pyroute2.netlink.rtnl.marshal import MarshalRtnl

        self._netlink.send(
            struct.pack("=IHHIIBxxxiIII", 36, _RTM_GETQDISC, _REQUEST | _DUMP, 1, 0, 0, self._index, 0, 0, 0)
        )
        found = Statistics(0, 0, 0)
        while True:
            for message in MarshalRtnl().parse(self._netlink.recv(65536)):
                if message["header"]["type"] == _NLMSG_DONE:
                    return found
                if message.get("index") == self._index and message.get_attr("TCA_KIND") == "clsact":
                    statistics = message.get_attr("TCA_STATS2")
                    basic = statistics.get_attr("TCA_STATS_BASIC")
                    drops = statistics.get_attr("TCA_STATS_QUEUE")["drops"]
                    found = Statistics(basic["packets"], basic["bytes"], drops)

    def close(self) -> None:
        """Open for good."""
        if self._cuts:
            self._cuts = 1
            self.heal()
        self._netlink.close()

    def _request(self, kind: int, flags: int, attributes: bytes = b"") -> None:
        info = socket.htons(_ETH_P_ALL) | 1 << 16  # protocol and priority
        body = struct.pack("=BxxxiIII", socket.AF_UNSPEC, self._index, 1, _CLSACT_EGRESS, info)
        body += _attribute(_TCA_KIND, b"bpf\0") + attributes
        self._netlink.send(struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body)
        _, answered, _, _, _, error = struct.unpack_from("=IHHIIi", self._netlink.recv(65536))
        if answered != _NLMSG_ERROR or error:
            raise FilterError(f"the gate at {self._ifname} cannot be moved: {os.strerror(-error)}")


def let_through(before: Statistics, cut: Statistics, healing: Statistics, seen: Statistics) -> Statistics:
    """Packets that passed at a cut or at its end and that the kernel counted all the same: it counts while the filter
    is linked, and drops while its program is in place (kernel: tc_new_tfilter, sch_handle_egress).

    `before` and `cut`: read right before and after the cut; `healing`: counted while it was taken back; `seen`: read
    later. Counted packets are more than dropped ones for one of two reasons: some passed, or a dropped one was a
    super-packet. If all of them, until now, can have passed at either end, they have. Otherwise it is known only where
    nothing had been dropped yet when the cut was done.
    """
    during = cut - before
    at_ends = during + healing
    more = (seen - before).packets - (seen - before).drops
    if 0 < more <= at_ends.packets:
        return Statistics(more, more * at_ends.bytes // at_ends.packets, 0)
    return during if during.drops == 0 else Statistics(0, 0, 0)


def _attribute(kind: int, payload: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(payload), kind) + payload + bytes(-len(payload) % 4)
