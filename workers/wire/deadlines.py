"""Every wait of the wire has a deadline, derived from the link it crosses. Pure arithmetic.

The constants are what a healthy worker on a busy CPU may take, times `patience`; the RTT multiples are what the
protocol needs.
"""

from dataclasses import dataclass, replace
from typing import Self

from workers.wire.frames import WireError


class DeadlineExceeded(WireError):
    """A peer did not do its part in time."""

    name = "deadline_exceeded"


SHORT_QUEUE_BITS = 64 * 1500 * 8  # the smallest bottleneck buffer of a lab's link; a longer one is a BDP or so
SHORT_LIFE_S = 1.0  # a connection that ends sooner counts as a failure: no peer is dialled in a tight loop


@dataclass(frozen=True, slots=True)
class Path:
    """The network between this worker and one peer. Within a datacenter: no delay worth counting, no rate limit.

    `patience` scales what the peer's CPU is allowed: more under emulation, less where faults shall be noticed soon.
    `connection_bps` is what one KV connection may send, where each has a bandwidth of its own (payload bits).
    """

    rtt_ns: int = 0
    rate_bps: int | None = None
    patience: float = 1.0
    connection_bps: int | None = None

    def of_channel(self, channel: str) -> Self:
        """As a connection of that channel sees it: only those for KV have a bandwidth of their own."""
        return self if channel == "kv" else replace(self, connection_bps=None)

    @property
    def rtt_s(self) -> float:
        return self.rtt_ns / 1e9

    @property
    def queue_s(self) -> float:
        """What a message may wait for others in each direction, where that is more than the RTT's multiples cover."""
        return 2 * SHORT_QUEUE_BITS / self.rate_bps if self.rate_bps else 0.0

    @property
    def connect_s(self) -> float:
        """TCP handshake and ours: two round trips, plus a SYN retransmitted twice (Linux: after 1 s, then 2 s)."""
        return 3.0 + 2.0 * self.patience + 4 * self.rtt_s + self.queue_s

    @property
    def stall_s(self) -> float:
        """No byte moves for this long while some should: lost. Covers a few retransmission back-offs."""
        return 15.0 * self.patience + 8 * self.rtt_s + self.queue_s

    @property
    def ping_every_s(self) -> float:
        return max(min(1.0, self.patience), self.rtt_s)

    @property
    def reply_s(self) -> float:
        """From asking a peer for something it has at hand until its answer is here."""
        return 10.0 * self.patience + 4 * self.rtt_s + self.queue_s

    def retry_s(self, failures: int) -> float:
        """Pause before dialling after `failures` in a row: none after none, then 50 ms doubling to 2 s (x patience)."""
        longest = min(2.0, max(0.1, 2.0 * self.patience))
        return min(longest, 0.05 * 2 ** min(failures - 1, 10)) if failures else 0.0


SAME_DATACENTER = Path()
