"""From what a link must do to what its two qdiscs are told, one direction at a time: pure arithmetic.

Owns the derived limits, the burst and the order of the stages; does no I/O. What it refuses is in `model.drivers`.

    sender -> router: tbf (rate, queue) -> node: netem (serialization, delay, loss, ...) -> router -> receiver

tbf holds packets back and drops what exceeds the queue; its tokens let a burst of a millisecond or so pass at once.
netem gives each packet its own serialization time after the one before it, so that the burst leaves as a line would
send it, and a lone packet takes the time that its bits need: what waits there is part of the buffer. As both have the
same rate (netem's is higher by a hair, so that rounding never makes its line grow), the burst that tbf has let through
and the tokens that it has left are one sum: the buffer is tbf's limit and its burst together, and that is the queue.
"""

from dataclasses import dataclass, replace

from testbed.links.qdisc import ETHERNET_HEADER_BYTES, PROBABILITY_ONE, U32_MAX, GilbertElliott, Netem, Tbf
from testbed.model.drivers import check_netem, delay_line_packets, rate_text, time_text
from testbed.model.impairment import (
    NS_PER_S,
    BernoulliLoss,
    GilbertElliottLoss,
    Impairment,
    Loss,
)

# A timer may fire this late before the tokens of the meantime are lost. 0.1 ms is usual on a real machine.
TIMER_LATENESS_NS = 1_000_000
# A super-packet may occupy the bottleneck for this long.
SUPER_PACKET_NS = 500_000
NETEM_HEADROOM = 100_000  # a netem rate is rate x (1 + 1/100,000)
# Without a rate, netem still needs one: it keeps packets in order only then. 15 ns for a full packet.
ORDERING_BYTES_PER_S = 100_000_000_000
# Lifting the limit of a link in use leaves its tbf in place, wide open.
OPEN_BYTES_PER_S = 1_000_000_000_000

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
    check_netem(impairment)
    rate_bps, queue_bytes = impairment.rate_bps, impairment.queue_bytes
    tbf = None
    if rate_bps is not None:
        assert queue_bytes is not None  # checked
        rate = round(rate_bps / 8)
        longest = gso_cap_bytes(rate_bps, mtu, queue_bytes)
        # The kernel compares a full packet with the burst including its Ethernet header.
        lateness = max(0, min(rate * timer_lateness_ns // NS_PER_S, queue_bytes // 2 - ETHERNET_HEADER_BYTES))
        burst = longest + ETHERNET_HEADER_BYTES + lateness
        tbf = Tbf(rate, burst, max(queue_bytes - burst, longest), mtu)
    netem = Netem(
        latency_ns=impairment.delay_ns,
        limit_packets=delay_line_packets(impairment),
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


def refuse_beyond_memory(what: str, impairments: tuple[Impairment, ...], mtu: int, available_bytes: int) -> None:
    """Raise ValueError when the directions of a link, full, would hold more than half of the free memory."""
    needed = sum(shape(impairment, mtu).memory_bytes for impairment in impairments)
    if needed > available_bytes // 2:
        parts = " + ".join(
            f"({rate_text(one.rate_bps)} x {time_text(one.longest_delay_ns())} in flight + {one.queue_bytes:,} B queue)"
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
