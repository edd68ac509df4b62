"""Limits of the WAN drivers that a link's values alone can exceed; what a machine lacks is no matter of this module.

Owns the refusals and their arithmetic: a topology file, a timeline and a change by hand are checked against them.
"""

from testbed.model.impairment import NS_PER_S, SMALLEST_PACKET_BYTES, GilbertElliottLoss, Impairment

NETEM_U32_MAX = 0xFFFFFFFF  # the kernel counts netem's packets and tbf's bytes in 32 bits
# tbf counts whole nanoseconds a packet: above this, rounding exceeds 1 % of a full packet's 120 ns.
RATE_MAX_BPS = 100_000_000_000
# The kernel reports the burst as 32 bits of 64 ns; slower than this it would wrap.
RATE_MIN_BPS = 1_000
DELAY_MAX_NS = 3600 * NS_PER_S
# What an unlimited link is expected to carry at most, for the size of its delay line only.
UNLIMITED_BPS = 40_000_000_000
UNLIMITED_PACKETS_MIN = 100_000
# netem may fall behind its clock by this much before its limit is felt.
STALL_NS = 1_000_000_000


def refusal(driver: str, impairment: Impairment, mtu: int) -> str | None:
    """The reason why a driver cannot do what one direction is asked; None when it can.

    One sentence that begins with the value's name (`codel: ...`). The emulator in userspace does whatever can be asked.
    """
    if driver == "netem":
        try:
            check_netem(impairment)
        except ValueError as error:
            return str(error)
    return None


def check_netem(impairment: Impairment) -> None:
    """Raise ValueError with the limit that is exceeded, the value's name first, and the arithmetic."""
    if impairment.rate_bps is not None:
        if impairment.rate_bps > RATE_MAX_BPS:
            raise ValueError(
                f"rate: {rate_text(impairment.rate_bps)} is above the netem driver's limit of "
                f"{rate_text(RATE_MAX_BPS)}: the kernel counts whole nanoseconds per packet, "
                "and a full packet takes fewer than 120 there"
            )
        if impairment.rate_bps < RATE_MIN_BPS:
            raise ValueError(f"rate: {impairment.rate_bps} bit/s is below the netem driver's limit of 1 kbit/s")
        if (impairment.queue_bytes or 0) > NETEM_U32_MAX:
            raise ValueError(
                f"queue: {impairment.queue_bytes:,} bytes exceed tbf's limit of {NETEM_U32_MAX:,} bytes; "
                "lower the queue, or the rate or delay that it is derived from"
            )
    if impairment.delay_ns > DELAY_MAX_NS:
        raise ValueError(f"delay: {time_text(impairment.delay_ns)} is above the netem driver's limit of one hour")
    if impairment.codel is not None:
        raise ValueError("codel: the netem driver has no CoDel stage; use driver: userspace, or leave codel out")
    if impairment.jitter is not None and isinstance(impairment.loss, GilbertElliottLoss):
        raise ValueError(
            "jitter: the netem driver cannot combine it with Gilbert-Elliott loss (its jitter changes the delay all "
            "the time, and netem starts the two-state model anew at each change); use driver: userspace"
        )
    if impairment.rate_bps is not None and impairment.queue_bytes is None:
        raise ValueError(
            f"queue: a rate of {impairment.rate_bps} bit/s needs a queue; give queue: {{bdp: 1.5}} or bytes"
        )
    packets = delay_line_packets(impairment)
    if packets > NETEM_U32_MAX:
        raise ValueError(
            f"delay: {time_text(impairment.longest_delay_ns())} at {rate_text(impairment.rate_bps)} are {packets:,} of "
            f"the smallest packets, and netem's limit is {NETEM_U32_MAX:,}; lower the rate or the delay"
        )


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


def rate_text(rate_bps: int | None) -> str:
    if rate_bps is None:
        return "no rate limit"
    for unit, size in (("gbit", 10**9), ("mbit", 10**6), ("kbit", 10**3)):
        if rate_bps >= size:
            return f"{rate_bps / size:g}{unit}"
    return f"{rate_bps} bit/s"


def time_text(duration_ns: int) -> str:
    return f"{duration_ns / NS_PER_S:g} s" if duration_ns >= NS_PER_S else f"{duration_ns / 1e6:g} ms"
