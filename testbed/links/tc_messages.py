"""The netlink messages of tbf, bfifo and netem, complete: what pyroute2 0.9's own messages leave out is here.

Owns the wire format only (kernel: include/uapi/linux/pkt_sched.h); `qdisc` gives it meaning. Missing in pyroute2:
64-bit rates, delays and jitter, burst sizes in bytes, Gilbert-Elliott loss, delay distributions, the seed, size
tables, bfifo. pyroute2's registry is left as it is: `open_netlink` teaches one socket to read these.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink import NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST, nla, nlmsg
from pyroute2.netlink.rtnl import RTM_DELQDISC, RTM_GETQDISC, RTM_NEWQDISC
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from testbed.machine.netns import network_namespace_of

TC_H_ROOT = 0xFFFFFFFF
ADD = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL
CHANGE = NLM_F_REQUEST | NLM_F_ACK  # no NLM_F_REPLACE: the qdisc and its packets stay, only its values change
GRAFT = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE


class tbf_options(nla):
    nla_map = (
        ("TCA_TBF_UNSPEC", "none"),
        ("TCA_TBF_PARMS", "parameters"),
        ("TCA_TBF_RTAB", "cdata"),
        ("TCA_TBF_PTAB", "cdata"),
        ("TCA_TBF_RATE64", "uint64"),
        ("TCA_TBF_PRATE64", "uint64"),
        ("TCA_TBF_BURST", "uint32"),
        ("TCA_TBF_PBURST", "uint32"),
        ("TCA_TBF_PAD", "none"),
    )

    class parameters(nla):
        fields = (
            *(("rate_cell_log", "B"), ("rate_linklayer", "B"), ("rate_overhead", "H")),
            *(("rate_cell_align", "h"), ("rate_mpu", "H"), ("rate", "I")),
            *(("peak_cell_log", "B"), ("peak_linklayer", "B"), ("peak_overhead", "H")),
            *(("peak_cell_align", "h"), ("peak_mpu", "H"), ("peak", "I")),
            *(("limit", "I"), ("buffer", "I"), ("mtu", "I")),
        )


class fifo_options(nla):
    fields = (("limit", "I"),)


class netem_options(nla):
    fields = (
        *(("latency", "I"), ("limit", "I"), ("loss", "I")),
        *(("gap", "I"), ("duplicate", "I"), ("jitter", "I")),
    )
    nla_map = (
        ("TCA_NETEM_UNSPEC", "none"),
        ("TCA_NETEM_CORR", "correlation"),
        ("TCA_NETEM_DELAY_DIST", "cdata"),
        ("TCA_NETEM_REORDER", "probability"),
        ("TCA_NETEM_CORRUPT", "probability"),
        ("TCA_NETEM_LOSS", "loss_model"),
        ("TCA_NETEM_RATE", "serialization"),
        ("TCA_NETEM_ECN", "uint32"),
        ("TCA_NETEM_RATE64", "uint64"),
        ("TCA_NETEM_PAD", "none"),
        ("TCA_NETEM_LATENCY64", "int64"),
        ("TCA_NETEM_JITTER64", "int64"),
        ("TCA_NETEM_SLOT", "cdata"),
        ("TCA_NETEM_SLOT_DIST", "cdata"),
        ("TCA_NETEM_PRNG_SEED", "uint64"),
    )

    class correlation(nla):
        fields = (("delay", "I"), ("loss", "I"), ("duplicate", "I"))

    class probability(nla):
        fields = (("probability", "I"), ("correlation", "I"))

    class serialization(nla):
        fields = (("rate", "I"), ("packet_overhead", "i"), ("cell_size", "I"), ("cell_overhead", "i"))

    class loss_model(nla):
        nla_map = (("NETEM_LOSS_UNSPEC", "none"), ("NETEM_LOSS_GI", "cdata"), ("NETEM_LOSS_GE", "gilbert_elliott"))

        class gilbert_elliott(nla):
            # p: good to bad, r: bad to good, h: 1 - loss in the bad state, k1: loss in the good state
            fields = (("p", "I"), ("r", "I"), ("h", "I"), ("k1", "I"))


class qdisc_message(nlmsg):
    """A tc message that understands this file's qdiscs; the options of any other kind stay bytes.

    Not a subclass of pyroute2's tcmsg: its compiled attribute map, once there, would be inherited and used.
    """

    prefix = "TCA_"
    fields = tcmsg.fields
    nla_map = (
        ("TCA_UNSPEC", "none"),
        ("TCA_KIND", "asciiz"),
        ("TCA_OPTIONS", "get_own_options"),
        ("TCA_STATS", "cdata"),
        ("TCA_XSTATS", "cdata"),
        ("TCA_RATE", "cdata"),
        ("TCA_FCNT", "cdata"),
        ("TCA_STATS2", "statistics"),
        ("TCA_STAB", "size_table"),
    )
    own_options = {"tbf": tbf_options, "bfifo": fifo_options, "netem": netem_options}

    @staticmethod
    def get_own_options(self: Any, *_: Any, **__: Any) -> Any:
        return qdisc_message.own_options.get(self.get_attr("TCA_KIND"), nla.cdata)

    class statistics(nla):
        nla_map = (
            ("TCA_STATS_UNSPEC", "none"),
            ("TCA_STATS_BASIC", "basic"),
            ("TCA_STATS_RATE_EST", "cdata"),
            ("TCA_STATS_QUEUE", "queue"),
            ("TCA_STATS_APP", "cdata"),
            ("TCA_STATS_RATE_EST64", "cdata"),
            ("TCA_STATS_PAD", "none"),
            ("TCA_STATS_BASIC_HW", "cdata"),
            ("TCA_STATS_PKT64", "uint64"),
        )

        class basic(nla):
            fields = (("bytes", "Q"), ("packets", "I"))

        class queue(nla):
            fields = (("qlen", "I"), ("backlog", "I"), ("drops", "I"), ("requeues", "I"), ("overlimits", "I"))

    class size_table(nla):
        nla_map = (("TCA_STAB_UNSPEC", "none"), ("TCA_STAB_BASE", "base"), ("TCA_STAB_DATA", "cdata"))

        class base(nla):
            fields = (
                *(("cell_log", "B"), ("size_log", "B"), ("cell_align", "h"), ("overhead", "i")),
                *(("linklayer", "I"), ("mpu", "I"), ("mtu", "I"), ("tsize", "I")),
            )


@contextmanager
def open_netlink(pid: int) -> Iterator[Any]:
    """A netlink socket in the network namespace of `pid`, whose qdiscs are read by this file's messages.

    The kernel's own words about a refused request are in the errors that it raises (NetlinkError).
    """
    with network_namespace_of(pid):
        netlink = IPRoute(ext_ack=True)
    try:
        netlink.asyncore.marshal.msg_map[RTM_NEWQDISC] = qdisc_message
        netlink.asyncore.status["nlm_generator"] = False  # IPRoute leaves it out, and nlm_request reads it
        yield netlink
    finally:
        netlink.close()


def send(netlink: Any, flags: int, index: int, parent: int, handle: int, kind: str, attributes: list[Any]) -> None:
    """Add or change one qdisc. `attributes` are TCA_OPTIONS and the like. Raises NetlinkError."""
    netlink.nlm_request(_message(index, parent, handle, kind, attributes), RTM_NEWQDISC, flags)


def encoded(flags: int, index: int, parent: int, handle: int, kind: str, attributes: list[Any]) -> bytearray:
    """Message that `send` would send, for a socket of one's own."""
    message = _message(index, parent, handle, kind, attributes)
    message["header"] |= {"type": RTM_NEWQDISC, "flags": flags}
    message.encode()
    return bytearray(message.data)


def _message(index: int, parent: int, handle: int, kind: str, attributes: list[Any]) -> Any:
    message = qdisc_message()
    message["index"], message["parent"], message["handle"] = index, parent, handle
    message["attrs"] = [["TCA_KIND", kind], *attributes]
    return message


def delete(netlink: Any, index: int, parent: int) -> None:
    """Remove the qdisc below `parent`."""
    message = qdisc_message()
    message["index"], message["parent"] = index, parent
    netlink.nlm_request(message, RTM_DELQDISC, NLM_F_REQUEST | NLM_F_ACK)


def receive(netlink: Any, index: int) -> list[Any]:
    """Every qdisc of one interface."""
    message = qdisc_message()
    message["index"] = index
    replies = netlink.nlm_request(message, RTM_GETQDISC, NLM_F_REQUEST | NLM_F_DUMP)
    return [reply for reply in replies if reply["index"] == index]
