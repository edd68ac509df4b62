"""From what a link must do to what its two qdiscs are told, one direction at a time: pure arithmetic.

Owns the derived limits, the burst, the order of the stages and the refusals; does no I/O.

    sender -> router: tbf (rate, queue) -> node: netem (serialization, delay, loss, ...) -> router -> receiver

tbf holds packets back and drops what exceeds the queue; its tokens let a burst of a millisecond or so pass at once.
netem gives each packet its own serialization time after the one before it, so that the burst leaves as a line would
send it, and a lone packet takes the time that its bits need: what waits there is part of the buffer. As both have the
same rate (netem's is higher by a hair, so that rounding never makes its line grow), the burst that tbf has let through
and the tokens that it has left are one sum: the buffer is tbf's limit and its burst together, and that is the queue.
"""

from dataclasses import dataclass, replace

from testbed.links.qdisc import ETHERNET_HEADER_BYTES, PROBABILITY_ONE, U32_MAX, GilbertElliott, Netem, Tbf
from testbed.model.impairment import (
    NS_PER_S,
    SMALLEST_PACKET_BYTES,
    BernoulliLoss,
    GilbertElliottLoss,
    Impairment,
    Loss,
)

# A timer may fire this late before the tokens of the meantime are lost. 0.1 ms is usual on a real machine.
TIMER_LATENESS_NS = 1_000_000
# A super-packet may occupy the bottleneck for this long.
SUPER_PACKET_NS = 500_000
# netem may fall behind its clock by this much before its limit is felt.
STALL_NS = 1_000_000_000
NETEM_HEADROOM = 100_000  # a netem rate is rate x (1 + 1/100,000)
# Without a rate, netem still needs one: it keeps packets in order only then. 15 ns for a full packet.
ORDERING_BYTES_PER_S = 100_000_000_000
# Lifting the limit of a link in use leaves its tbf in place, wide open.
OPEN_BYTES_PER_S = 1_000_000_000_000
# What an unlimited link is expected to carry at most, for the size of its delay line only.
UNLIMITED_BPS = 40_000_000_000
UNLIMITED_PACKETS_MIN = 100_000

# tbf counts whole nanoseconds a packet: above this, rounding exceeds 1 % of a full packet's 120 ns.
RATE_MAX_BPS = 100_000_000_000
# The kernel reports the burst as 32 bits of 64 ns; slower than this it would wrap.
RATE_MIN_BPS = 1_000
DELAY_MAX_NS = 3600 * NS_PER_S
# What the kernel charges for a full packet (truesize: 2304 bytes for 1500), and a little.
MEMORY_PER_BYTE = 1.6


@dataclass(frozen=True, slots=True)
class Shape:
    """One direction as the kernel will do it."""

    tbf: Tbf | None  # None: no limit
    netem: Netem
    memory_bytes: int  # held when queue and delay line are full of full-size packets

    def with_seed(self, seed: int) -> Netem:
        """The delay line with a seed for its random decisions, where there are any."""
        return replace(self.netem, seed=seed) if self.netem.is_random else self.netem


def gso_cap_bytes(rate_bps: int | None, mtu: int, queue_bytes: int | None = None) -> int:
    """The longest super-packet (gso_max_size) that sending hosts may hand to a link: half a millisecond of its rate.

    Never above a quarter of the queue, where one is given, nor below one packet.
    """
    if rate_bps is None:
        return 65_536
    cap = rate_bps * SUPER_PACKET_NS // (8 * NS_PER_S)
    if queue_bytes is not None:
        cap = min(cap, queue_bytes // 4)
    return max(mtu, min(cap, 65_536))


def shape(impairment: Impairment, mtu: int, timer_lateness_ns: int = TIMER_LATENESS_NS) -> Shape:
    """The two stages of a direction. Raises ValueError with the limit that is exceeded and the arithmetic."""
    _check(impairment)
    rate_bps, queue_bytes = impairment.rate_bps, impairment.queue_bytes
    tbf = None
    if rate_bps is not None:
        if queue_bytes is None:
            raise ValueError(f"queue: a rate of {rate_bps} bit/s needs a queue; give queue: {{bdp: 1.5}} or bytes")
        rate = round(rate_bps / 8)
        longest = gso_cap_bytes(rate_bps, mtu, queue_bytes)
        # The kernel compares a full packet with the burst including its Ethernet header.
        lateness = max(0, min(rate * timer_lateness_ns // NS_PER_S, queue_bytes // 2 - ETHERNET_HEADER_BYTES))
        burst = longest + ETHERNET_HEADER_BYTES + lateness
        tbf = Tbf(rate, burst, max(queue_bytes - burst, longest), mtu)
    packets = delay_line_packets(impairment)
    if packets > U32_MAX:
        raise ValueError(
            f"delay: {_seconds(impairment.longest_delay_ns())} at {_rate(rate_bps)} are {packets:,} of the smallest "
            f"packets, and netem's limit is {U32_MAX:,}; lower the rate or the delay"
        )
    netem = Netem(
        latency_ns=impairment.delay_ns,
        limit_packets=packets,
        rate_bytes_per_s=ORDERING_BYTES_PER_S
        if tbf is None
        else -(-tbf.rate_bytes_per_s * (NETEM_HEADROOM + 1) // NETEM_HEADROOM),
        loss=fraction(impairment.loss.probability) if isinstance(impairment.loss, BernoulliLoss) else 0,
        gilbert_elliott=_gilbert_elliott(impairment.loss),
        duplicate=fraction(impairment.duplication),
        corrupt=fraction(impairment.corruption),
        reorder=fraction(impairment.reordering),
        split=bool(
            impairment.loss
            or impairment.duplication
            or impairment.corruption
            or impairment.reordering
            or impairment.jitter  # whose many changes need a short message, without the size table
        ),
    )
    held = (impairment.delay_line_bytes() or 0) + (queue_bytes or 0)
    return Shape(tbf, netem, int(held * MEMORY_PER_BYTE))


def delay_line_packets(impairment: Impairment) -> int:
    """Number of packets that netem must hold: the smallest there are, over the whole delay, at the full rate.

    Without a rate: what 40 Gbit/s of full packets would need, and at least 100,000.
    """
    delay_ns = impairment.longest_delay_ns() + STALL_NS
    copies = 2 if impairment.duplication else 1
    if impairment.rate_bps is None:
        full = UNLIMITED_BPS * delay_ns // (8 * NS_PER_S * 1500)
        return copies * max(full, UNLIMITED_PACKETS_MIN)
    return copies * -(-impairment.rate_bps * delay_ns // (8 * NS_PER_S * SMALLEST_PACKET_BYTES))


def refuse_beyond_memory(what: str, impairments: tuple[Impairment, ...], mtu: int, available_bytes: int) -> None:
    """Raise ValueError when the directions of a link, full, would hold more than half of the free memory."""
    needed = sum(shape(impairment, mtu).memory_bytes for impairment in impairments)
    if needed > available_bytes // 2:
        parts = " + ".join(
            f"({_rate(one.rate_bps)} x {_seconds(one.longest_delay_ns())} in flight + {one.queue_bytes:,} B queue)"
            for one in impairments
            if one.rate_bps is not None
        )
        raise ValueError(
            f"{what} would hold {needed / 1e9:.1f} GB, more than the {available_bytes / 2e9:.1f} GB that this machine "
            f'can spare: {MEMORY_PER_BYTE} x {parts}; lower the rate, the delay or "queue"'
        )


def wide_open(mtu: int) -> Tbf:
    """A tbf that holds nothing back: for a link whose limit was lifted while it carried traffic."""
    return Tbf(OPEN_BYTES_PER_S, U32_MAX >> 1, U32_MAX >> 1, mtu)


def fraction(probability: float) -> int:
    """A probability as netem's fraction of 2^32 - 1; what is asked for is never rounded to nothing."""
    return max(round(probability * PROBABILITY_ONE), 1) if probability > 0 else 0


def _gilbert_elliott(loss: Loss | None) -> GilbertElliott | None:
    if not isinstance(loss, GilbertElliottLoss):
        return None
    return GilbertElliott(
        good_to_bad=fraction(loss.good_to_bad),
        bad_to_good=fraction(loss.bad_to_good),
        kept_bad=fraction(1 - loss.loss_bad),
        loss_good=fraction(loss.loss_good),
    )


def _check(impairment: Impairment) -> None:
    if impairment.rate_bps is not None:
        if impairment.rate_bps > RATE_MAX_BPS:
            raise ValueError(
                f"rate: {_rate(impairment.rate_bps)} is above the netem driver's limit of {_rate(RATE_MAX_BPS)}: "
                "the kernel counts whole nanoseconds per packet, and a full packet takes fewer than 120 there"
            )
        if impairment.rate_bps < RATE_MIN_BPS:
            raise ValueError(f"rate: {impairment.rate_bps} bit/s is below the netem driver's limit of 1 kbit/s")
        if (impairment.queue_bytes or 0) > U32_MAX:
            raise ValueError(
                f"queue: {impairment.queue_bytes:,} bytes exceed tbf's limit of {U32_MAX:,} bytes; "
                "lower the queue, or the rate or delay that it is derived from"
            )
    if impairment.delay_ns > DELAY_MAX_NS:
        raise ValueError(f"delay: {_seconds(impairment.delay_ns)} is above the netem driver's limit of one hour")
    if impairment.codel is not None:
        raise ValueError("codel: the netem driver has no CoDel stage; use driver: userspace, or leave codel out")
    if impairment.jitter is not None and isinstance(impairment.loss, GilbertElliottLoss):
        raise ValueError(
            "jitter: the netem driver cannot combine it with Gilbert-Elliott loss (its jitter changes the delay all "
            "the time, and netem starts the two-state model anew at each change); use driver: userspace"
        )


def _rate(rate_bps: int | None) -> str:
    if rate_bps is None:
        return "no rate limit"
    for unit, size in (("gbit", 10**9), ("mbit", 10**6), ("kbit", 10**3)):
        if rate_bps >= size:
            return f"{rate_bps / size:g}{unit}"
    return f"{rate_bps} bit/s"


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / NS_PER_S:g} s" if duration_ns >= NS_PER_S else f"{duration_ns / 1e6:g} ms"


def _serialization(tbf: Tbf | None) -> int:
    """netem's rate in bytes/s, rounded up: a hair more than tbf lets through."""
    if tbf is None:
        return ORDERING_BYTES_PER_S
    return -(-tbf.rate_bytes_per_s * (NETEM_HEADROOM + 1) // NETEM_HEADROOM)
