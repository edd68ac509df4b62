"""What one direction of a WAN link does to packets: one immutable value that both drivers apply.

Owns the vocabulary (rate, delay, queue) and the limits derived from it; knows no kernel and no driver.
"""

from dataclasses import dataclass

NS_PER_S = 1_000_000_000
# The smallest packets that can fill a delay line: an IPv4 header and a UDP header without payload.
SMALLEST_PACKET_BYTES = 28


@dataclass(frozen=True, slots=True)
class Impairment:
    """One direction. `rate_bps` counts IP bytes; None means no limit. `delay_ns` is one-way."""

    rate_bps: int | None = None
    delay_ns: int = 0
    queue_bytes: int | None = None  # bottleneck buffer, tail drop; None only where rate_bps is None

    def serialization_ns(self, ip_bytes: int) -> int:
        """Time that `ip_bytes` occupy the bottleneck."""
        return 0 if self.rate_bps is None else ip_bytes * 8 * NS_PER_S // self.rate_bps

    def delay_line_bytes(self) -> int | None:
        """Bytes in flight on the delay line when the bottleneck is full; None without a rate limit."""
        return None if self.rate_bps is None else self.rate_bps * self.delay_ns // (8 * NS_PER_S)


def bdp_bytes(rate_bps: int, rtt_ns: int) -> int:
    """Bandwidth-delay product in bytes."""
    return rate_bps * rtt_ns // (8 * NS_PER_S)
