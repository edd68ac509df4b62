"""Every wait of the wire has a deadline, derived from the link it crosses as the link is at that moment.

The constants are what a healthy worker on a busy CPU may take, times `patience`; the RTT multiples are what the
protocol needs, the queue's what a message may wait behind others. `Timer` and `within` ask for the limit again while
they wait, so that a link that changes moves the deadlines of what is under way.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

from workers.wire.frames import WireError


class DeadlineExceeded(WireError):
    """A peer did not do its part in time."""

    name = "deadline_exceeded"


SHORT_QUEUE_BITS = 64 * 1500 * 8  # the smallest bottleneck buffer of a lab's link
SHORT_LIFE_S = 1.0  # a connection that ends sooner counts as a failure: no peer is dialled in a tight loop
LOOK_S = 0.25  # how often a wait asks for its limit again
PING_BITS = 128_000  # pings with their answers and statuses take an eighth of a link's rate at most
ROUND_TRIP_PINGS_S = 5.0  # pings are no rarer than that, however long the link: it may become short meanwhile


class Link(NamedTuple):
    """The network between two workers: round trip, rate (None: no limit), and what a message may wait in both
    directions' bottleneck buffers together.
    """

    rtt_ns: int = 0
    rate_bps: int | None = None
    queue_ns: int = 0


class Present(Protocol):
    """A link that changes while workers run."""

    def now(self) -> Link:
        """As the link is."""
        ...

    def longest(self) -> Link:
        """As it is for the slowest byte that may still be on its way: a while after a change, as it was before."""
        ...


@dataclass(frozen=True, slots=True)
class Path:
    """The network between this worker and one peer. Within a datacenter: no delay worth counting, no rate limit.

    `rtt_ns`, `rate_bps` and `queue_ns` hold where nobody says what the link is now (`present`); read `now` instead.
    `patience` scales what the peer's CPU is allowed: more under emulation, less where faults shall be noticed soon.
    `connection_bps` is what one KV connection may send, where each has a bandwidth of its own (payload bits).
    """

    rtt_ns: int = 0
    rate_bps: int | None = None
    patience: float = 1.0
    connection_bps: int | None = None
    queue_ns: int = 0
    present: Present | None = None

    def of_channel(self, channel: str) -> Self:
        """As a connection of that channel sees it: only those for KV have a bandwidth of their own."""
        return self if channel == "kv" else replace(self, connection_bps=None)

    @property
    def now(self) -> Link:
        """The link at this moment."""
        return Link(self.rtt_ns, self.rate_bps, self.queue_ns) if self.present is None else self.present.now()

    @property
    def _longest(self) -> Link:
        return self.now if self.present is None else self.present.longest()

    @property
    def rtt_s(self) -> float:
        return self._longest.rtt_ns / 1e9

    @property
    def queue_s(self) -> float:
        """The time that a message may wait for others, in both directions together."""
        link = self._longest
        return max(link.queue_ns / 1e9, 2 * SHORT_QUEUE_BITS / link.rate_bps if link.rate_bps else 0.0)

    @property
    def connect_s(self) -> float:
        """TCP handshake and ours: two round trips, plus a SYN retransmitted twice (Linux: after 1 s, then 2 s), and a
        packet that a full buffer dropped once more."""
        return 3.0 + 2.0 * self.patience + 4 * self.rtt_s + 3 * self.queue_s

    @property
    def stall_s(self) -> float:
        """No byte moves for this long while some should: lost. Covers a few retransmission back-offs."""
        return 15.0 * self.patience + 8 * self.rtt_s + 3 * self.queue_s

    @property
    def keep_alive_s(self) -> float:
        """A sender with nothing to send for so long, amid a transfer, says that it is alive: well within the
        stall deadline, also of a link that becomes shorter meanwhile."""
        return min(self.stall_s, 15.0 * self.patience) / 4

    @property
    def ping_every_s(self) -> float:
        link = self.now
        slow_s = PING_BITS / link.rate_bps if link.rate_bps else 0.0
        return max(min(1.0, self.patience), min(max(link.rtt_ns / 1e9, slow_s), ROUND_TRIP_PINGS_S * self.patience))

    @property
    def reply_s(self) -> float:
        """From asking a peer for something it has at hand until its answer is here."""
        return 10.0 * self.patience + 4 * self.rtt_s + 2 * self.queue_s

    def retry_s(self, failures: int) -> float:
        """Pause before dialling after `failures` in a row: none after none, then 50 ms doubling to 2 s (x patience)."""
        longest = min(2.0, max(0.1, 2.0 * self.patience))
        return min(longest, 0.05 * 2 ** min(failures - 1, 10)) if failures else 0.0


SAME_DATACENTER = Path()


class Timer:
    """Calls `expire` once `limit_s` has passed since the beginning, or since `progress` last returned another value.

    `limit_s` and `progress` are asked again every `LOOK_S`, so that the limit follows a link that changes.
    """

    def __init__(
        self,
        limit_s: Callable[[], float],
        expire: Callable[[], None],
        progress: Callable[[], object] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit_s = limit_s
        self._expire = expire
        self._progress = progress
        self._seen = progress() if progress is not None else None
        self._since = self._loop.time()
        self._handle = self._loop.call_later(min(LOOK_S, limit_s()), self._look)

    def cancel(self) -> None:
        self._handle.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if self._progress is not None and (seen := self._progress()) != self._seen:
            self._seen, self._since = seen, now
        left = self._since + self._limit_s() - now
        if left <= 0:
            self._expire()
        else:
            self._handle = self._loop.call_later(min(LOOK_S, left), self._look)


@asynccontextmanager
async def within(limit_s: Callable[[], float], progress: Callable[[], object] | None = None) -> AsyncIterator[None]:
    """Run a block like `asyncio.timeout`, with a limit that moves (see `Timer`). Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:
        timer = Timer(limit_s, lambda: timeout.reschedule(loop.time()), progress)
        try:
            yield
        finally:
            timer.cancel()
