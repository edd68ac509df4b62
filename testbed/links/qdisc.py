"""Queueing disciplines as values: what tbf and netem are asked to do, and what the kernel says that they do.

Owns the translation between those values and `tc_messages`, both ways; decides nothing (see `shaping`).
Rates here are bytes/s as in the kernel; lengths are IP bytes, by means of a size table.
"""

import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from testbed.links import tc_messages as tc

ROOT_HANDLE = 0x10000  # 1:
ETHERNET_HEADER_BYTES = 14
LINKLAYER_ETHERNET = 1  # without it the kernel wants the old rate tables
TICK_NS = 64  # what the kernel's old fields count in (include/net/pkt_sched.h: PSCHED_SHIFT)
PROBABILITY_ONE = 0xFFFFFFFF
U32_MAX = 0xFFFFFFFF
# A size table maps a packet's length, in cells of 2 bytes, to the bytes that it is charged for, in units of 2.
CELL_BYTES_LOG = 1
CELLS = 32_700  # 65,400 bytes; a netlink attribute holds at most 65,535 bytes, and a cell takes 2
IP_AND_TCP_HEADER_BYTES = 52  # with timestamps, as Linux sends


@dataclass(frozen=True, slots=True)
class Tbf:
    """A token bucket in front of a byte-limited FIFO. Lengths are IP bytes, a super-packet's those of its segments."""

    rate_bytes_per_s: int
    burst_bytes: int  # tokens that collect; a longer super-packet is segmented
    limit_bytes: int  # waiting, the packet in service included
    mtu: int  # of the link, for the size table


@dataclass(frozen=True, slots=True)
class GilbertElliott:
    """netem's two-state loss, as fractions of PROBABILITY_ONE."""

    good_to_bad: int
    bad_to_good: int
    kept_bad: int
    loss_good: int

    def describe(self) -> dict[str, float]:
        """The four probabilities as the topology file names them."""
        return {
            "good_to_bad": self.good_to_bad / PROBABILITY_ONE,
            "bad_to_good": self.bad_to_good / PROBABILITY_ONE,
            "loss_bad": 1 - self.kept_bad / PROBABILITY_ONE,
            "loss_good": self.loss_good / PROBABILITY_ONE,
        }


@dataclass(frozen=True, slots=True)
class Netem:
    """A delay line. Probabilities are fractions of PROBABILITY_ONE; 0 is off."""

    latency_ns: int
    limit_packets: int
    rate_bytes_per_s: int  # serialization; any rate makes netem keep packets in order
    jitter_ns: int = 0
    loss: int = 0
    gilbert_elliott: GilbertElliott | None = None
    duplicate: int = 0
    corrupt: int = 0
    reorder: int = 0
    split: bool = False  # every packet comes alone: super-packets were segmented on the way
    seed: int | None = None  # kernels before 6.7 take none, and report none

    @property
    def drops_packets(self) -> bool:
        """True when it may drop on purpose (a corrupted packet is dropped where its checksum cannot be finished)."""
        return bool(self.loss or self.gilbert_elliott or self.corrupt)

    @property
    def is_random(self) -> bool:
        return self.drops_packets or bool(self.duplicate or self.reorder)

    def describe(self) -> dict[str, Any]:
        """Plain values, named as in `Impairment` where they are the same."""
        loss = {"probability": self.loss / PROBABILITY_ONE} if self.loss else None
        if self.gilbert_elliott is not None:
            loss = self.gilbert_elliott.describe()
        return {
            "delay_ns": self.latency_ns,
            "delay_line_packets": self.limit_packets,
            "serialization_bps": self.rate_bytes_per_s * 8,
            "jitter": None,  # `wander` moves the delay
            "loss": loss,
            "duplication": self.duplicate / PROBABILITY_ONE,
            "corruption": self.corrupt / PROBABILITY_ONE,
            "reordering": self.reorder / PROBABILITY_ONE,
            "split": self.split,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True)
class Statistics:
    """A qdisc's counters. `packets` are MTU segments; `bytes` are IP bytes under a size table."""

    packets: int
    bytes: int
    drops: int
    queued_packets: int
    queued_bytes: int


@dataclass(frozen=True, slots=True)
class Installed:
    """The root qdisc of an interface as the kernel reports it; `settings` is None for any other kind."""

    kind: str
    settings: Tbf | Netem | None
    statistics: Statistics
    charges_ip_bytes: bool  # a size table of ours is in place, or Ethernet headers are taken off


@lru_cache(maxsize=8)
def size_table(mtu: int) -> bytes:
    """Cost of each packet length (Ethernet header included) in IP bytes on a link of `mtu`; odd ones rounded up.

    The kernel counts a super-packet's headers once (__qdisc_calculate_pkt_len); the table counts them once per
    segment, TCP over IPv4 with timestamps assumed: exact for full segments, within 40 bytes in 65,000 without them.
    """
    payload_bytes = mtu - IP_AND_TCP_HEADER_BYTES
    charges = []
    for cell in range(CELLS):
        ip_bytes = max(1, (cell << CELL_BYTES_LOG) - ETHERNET_HEADER_BYTES)
        if ip_bytes > mtu:
            segments = -(-(ip_bytes - IP_AND_TCP_HEADER_BYTES) // payload_bytes)
            ip_bytes += (segments - 1) * IP_AND_TCP_HEADER_BYTES
        charges.append((ip_bytes + 1) >> CELL_BYTES_LOG)
    return struct.pack(f"{CELLS}H", *charges)


def install(netlink: Any, index: int, settings: Tbf | Netem, mtu: int, present: bool) -> None:
    """Make `settings` the root qdisc of an interface, or change the `present` one, whose packets stay."""
    flags = tc.CHANGE if present else tc.GRAFT
    tc.send(netlink, flags, index, tc.TC_H_ROOT, ROOT_HANDLE, *_attributes(settings, mtu))


def change_message(index: int, netem: Netem, mtu: int) -> tuple[bytearray, int]:
    """The bytes of a message that changes a netem, and where in them the delay stands (8 bytes, native order)."""
    unlikely_ns = 0x7A11_5B1E_0DD5_EED5
    attributes = _attributes(replace(netem, latency_ns=unlikely_ns), mtu)
    message = tc.encoded(tc.CHANGE, index, tc.TC_H_ROOT, ROOT_HANDLE, *attributes)
    position = message.index(struct.pack("=q", unlikely_ns))
    struct.pack_into("=q", message, position, netem.latency_ns)
    return message, position


def installed(netlink: Any, index: int, mtu: int) -> Installed | None:
    """The root qdisc, or None where the interface has none (noqueue)."""
    for message in tc.receive(netlink, index):
        if message["parent"] == tc.TC_H_ROOT:
            kind = message.get_attr("TCA_KIND")
            options = message.get_attr("TCA_OPTIONS")
            settings = {"tbf": _read_tbf, "netem": _read_netem}.get(kind, lambda *_: None)(options, mtu)
            table = message.get_attr("TCA_STAB")
            base = table.get_attr("TCA_STAB_BASE") if table else {"tsize": 0, "overhead": 0}
            without_header = base["tsize"] == 0 and base["overhead"] == -ETHERNET_HEADER_BYTES
            if isinstance(settings, Netem):
                settings = replace(settings, split=without_header)
            return Installed(kind, settings, _read_statistics(message), without_header or base["tsize"] == CELLS)
    return None


def differences(asked: Tbf | Netem, got: Tbf | Netem | None) -> list[str]:
    """Values for which the kernel does something else than it was asked to, as `name: asked, got`."""
    if got is None or type(got) is not type(asked):
        return [f"qdisc: {type(asked).__name__.lower()}, {got}"]
    return [
        f"{name}: {getattr(asked, name)}, {getattr(got, name)}"
        for name in asked.__dataclass_fields__
        if getattr(asked, name) != getattr(got, name)
        and not _same_burst(name, asked, got)
        and not _no_matter_of_seed(name, asked, got)
    ]


def _no_matter_of_seed(name: str, asked: Tbf | Netem, got: Tbf | Netem) -> bool:
    """Old kernels have no seed; new ones choose one where none is given."""
    return name == "seed" and None in (getattr(asked, name), getattr(got, name))


def _same_burst(name: str, asked: Tbf | Netem, got: Tbf | Netem) -> bool:
    """The kernel reports the burst as time in ticks; one tick and one byte either way is the same."""
    if name != "burst_bytes" or not isinstance(asked, Tbf) or not isinstance(got, Tbf):
        return False
    tick_bytes = TICK_NS * asked.rate_bytes_per_s // 10**9
    return abs(asked.burst_bytes - got.burst_bytes) <= tick_bytes + 2


def _attributes(settings: Tbf | Netem, mtu: int) -> tuple[str, list[Any]]:
    """Kind, options and size table. A change that leaves the table out would remove it."""
    if isinstance(settings, Netem) and settings.split:
        base = {"overhead": -ETHERNET_HEADER_BYTES, "linklayer": LINKLAYER_ETHERNET}
        table: list[Any] = [["TCA_STAB_BASE", base]]
    else:
        base = {"cell_log": CELL_BYTES_LOG, "size_log": CELL_BYTES_LOG, "linklayer": LINKLAYER_ETHERNET, "tsize": CELLS}
        table = [["TCA_STAB_BASE", base], ["TCA_STAB_DATA", size_table(mtu)]]
    kind, options = _tbf_options(settings) if isinstance(settings, Tbf) else _netem_options(settings)
    return kind, [["TCA_OPTIONS", options], ["TCA_STAB", {"attrs": table}]]


def _tbf_options(tbf: Tbf) -> tuple[str, dict[str, Any]]:
    rate = tbf.rate_bytes_per_s
    parameters = {"rate_linklayer": LINKLAYER_ETHERNET, "rate": min(rate, U32_MAX), "limit": tbf.limit_bytes}
    attributes = [
        ["TCA_TBF_PARMS", parameters],
        ["TCA_TBF_RATE64", rate],
        ["TCA_TBF_BURST", tbf.burst_bytes],
    ]
    return "tbf", {"attrs": attributes}


def _netem_options(netem: Netem) -> tuple[str, dict[str, Any]]:
    rate = netem.rate_bytes_per_s
    # Whatever is left out keeps its former value in a change: everything is sent, zeros included.
    attributes: list[list[Any]] = [
        ["TCA_NETEM_LATENCY64", netem.latency_ns],
        ["TCA_NETEM_JITTER64", netem.jitter_ns],
        ["TCA_NETEM_RATE", {"rate": min(rate, U32_MAX)}],
        ["TCA_NETEM_RATE64", rate],
        ["TCA_NETEM_CORRUPT", {"probability": netem.corrupt}],
        ["TCA_NETEM_REORDER", {"probability": netem.reorder}],
    ]
    if netem.seed is not None:
        attributes.append(["TCA_NETEM_PRNG_SEED", netem.seed])
    if netem.gilbert_elliott is not None:
        ge = netem.gilbert_elliott
        model = {"p": ge.good_to_bad, "r": ge.bad_to_good, "h": ge.kept_bad, "k1": ge.loss_good}
        attributes.append(["TCA_NETEM_LOSS", {"attrs": [["NETEM_LOSS_GE", model]]}])
    options = {
        "limit": netem.limit_packets,
        "loss": netem.loss,
        "duplicate": netem.duplicate,
        "gap": 1 if netem.reorder else 0,  # every packet may be the one that overtakes
        "attrs": attributes,
    }
    return "netem", options


def _read_tbf(options: Any, mtu: int) -> Tbf:
    parameters = options.get_attr("TCA_TBF_PARMS")
    rate = options.get_attr("TCA_TBF_RATE64") or parameters["rate"]
    burst = round(parameters["buffer"] * TICK_NS * rate / 10**9)
    return Tbf(rate, burst, parameters["limit"], mtu)


def _read_netem(options: Any, _: int) -> Netem:
    serialization = options.get_attr("TCA_NETEM_RATE") or {"rate": 0}
    corrupt = options.get_attr("TCA_NETEM_CORRUPT") or {"probability": 0}
    reorder = options.get_attr("TCA_NETEM_REORDER") or {"probability": 0}
    model = options.get_attr("TCA_NETEM_LOSS")
    ge = model.get_attr("NETEM_LOSS_GE") if model else None
    return Netem(
        latency_ns=options.get_attr("TCA_NETEM_LATENCY64"),
        limit_packets=options["limit"],
        rate_bytes_per_s=options.get_attr("TCA_NETEM_RATE64") or serialization["rate"],
        jitter_ns=options.get_attr("TCA_NETEM_JITTER64"),
        loss=options["loss"],
        gilbert_elliott=GilbertElliott(ge["p"], ge["r"], ge["h"], ge["k1"]) if ge else None,
        duplicate=options["duplicate"],
        corrupt=corrupt["probability"],
        reorder=reorder["probability"] if options["gap"] else 0,
        seed=options.get_attr("TCA_NETEM_PRNG_SEED"),
    )


def _read_statistics(message: Any) -> Statistics:
    counters = message.get_attr("TCA_STATS2")
    basic, queue = counters.get_attr("TCA_STATS_BASIC"), counters.get_attr("TCA_STATS_QUEUE")
    packets = counters.get_attr("TCA_STATS_PKT64")
    return Statistics(
        packets=basic["packets"] if packets is None else packets,
        bytes=basic["bytes"],
        drops=queue["drops"],
        queued_packets=queue["qlen"],
        queued_bytes=queue["backlog"],
    )
