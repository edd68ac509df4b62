"""The bottleneck of one direction: a FIFO queue with tail drop in front of a serializer with a logical clock.

Owns the order and the times at which MTU segments leave the bottleneck. Times follow from arrivals and the
rate alone, never from when the process happened to look: call `advance` as late as you like. No I/O.
"""

from collections import deque
from collections.abc import Callable

from testbed.links.emulator.codel import CoDelState
from testbed.links.emulator.packet import Packet
from testbed.model.impairment import NS_PER_S, CoDel

FOREVER = 1 << 62
# Segments of a super-packet that leave within this time may travel on as one smaller super-packet.
CHUNK_NS = 500_000

# Called with (packet, first segment, last segment + 1, logical time at which the last bit has left).
Deliver = Callable[[Packet, int, int, int], None]


class Bottleneck:
    """`finish` is when the chunk in service leaves; `advance(now)` must be called before `offer` at `now`."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        # Packet, last segment + 1 (those behind it found no room), arrival.
        self._queue: deque[tuple[Packet, int, int]] = deque()
        self._rate_bps: int | None = None
        self._limit_bytes = 0
        self._packet: Packet | None = None  # in service: segments _first.._end-1 are being serialized
        self._first = self._end = self._last = self._arrival = self._chunk = 0
        self._codel: CoDelState | None = None
        self._chunk_bytes = 0
        self._remainder = 0  # of the division by the rate, so that rounding never adds up
        self.finish = FOREVER
        self.queued_bytes = 0  # waiting or in service
        self.queued_bytes_max = 0
        self.dropped_tail = 0  # segments
        self.dropped_codel = 0

    def configure(self, rate_bps: int | None, queue_bytes: int | None, codel: CoDel | None, now: int) -> None:
        """Change rate and limit at `now`. What is queued stays; what remains of it leaves at the new rate."""
        self.advance(now)
        old, self._rate_bps = self._rate_bps, rate_bps
        self._limit_bytes = FOREVER if queue_bytes is None else queue_bytes
        if codel is None:
            self._codel = None
        elif self._codel is None or self._codel.parameters != codel:
            self._codel = CoDelState(codel)
        if self.finish == FOREVER or old is None or old == rate_bps:
            return
        self._remainder = 0
        if rate_bps is None:
            self._flush(now)
        else:
            self.finish = now + (self.finish - now) * old // rate_bps

    def offer(self, packet: Packet, now: int) -> None:
        """A packet arrives. Segments that find no room are dropped, the ones before them stay."""
        if self._rate_bps is None:
            self._deliver(packet, 0, packet.segments, now)
            return
        last = packet.segments
        size = packet.ip_bytes
        if self.queued_bytes + size > self._limit_bytes:
            last = packet.segments_within(self._limit_bytes - self.queued_bytes + self._served_bytes(now))
            if last == 0 and self.finish == FOREVER:
                last = 1  # an idle link carries a packet however small its queue
            self.dropped_tail += packet.segments - last
            if last == 0:
                return
            size = packet.bytes_of(0, last)
        self.queued_bytes += size
        if self.queued_bytes > self.queued_bytes_max:
            self.queued_bytes_max = max(self.queued_bytes_max, self.queued_bytes - self._served_bytes(now))
        if self.finish == FOREVER:
            self._remainder = 0
            self._take(packet, last, now)
            self._serve(now)
        else:
            self._queue.append((packet, last, now))

    def advance(self, now: int) -> None:
        """Deliver every chunk whose last bit has left the bottleneck by `now`."""
        while self.finish <= now:
            packet, first, end, at = self._packet, self._first, self._end, self.finish
            assert packet is not None
            self.queued_bytes -= self._chunk_bytes
            self._first = end
            if self._has_next() and (self._codel is None or self._survives_codel(self._codel, at)):
                self._serve(at)
            else:
                self._packet = None
                self.finish = FOREVER
                if self._codel is not None:
                    self._codel.emptied()
            self._deliver(packet, first, end, at)

    def _has_next(self) -> bool:
        """Is there a segment to serve? Then `_first` is it."""
        if self._first < self._last:
            return True
        if not self._queue:
            return False
        self._take(*self._queue.popleft())
        return True

    def _survives_codel(self, codel: CoDelState, now: int) -> bool:
        """Drop segments from the head as CoDel says; False when none is left."""
        while True:
            assert self._packet is not None
            size = self._packet.bytes_of(self._first, self._first + 1)
            if not codel.drops(now - self._arrival, size, self.queued_bytes - size, now):
                return True
            self.queued_bytes -= size
            self.dropped_codel += 1
            self._first += 1
            if not self._has_next():
                return False

    def _take(self, packet: Packet, last: int, arrival: int) -> None:
        """`packet` comes to the head of the queue: in how many chunks will it be serialized?"""
        assert self._rate_bps is not None
        self._packet, self._first, self._last, self._arrival = packet, 0, last, arrival
        if last == 1:
            self._chunk = 1
        else:
            longest = max(1, self._rate_bps * CHUNK_NS // (8 * NS_PER_S) // packet.segment_bytes)
            pieces = -(-last // longest)
            self._chunk = -(-last // pieces)  # as equal as possible: no short piece at the end

    def _serve(self, start: int) -> None:
        """Serialization of the next chunk starts at `start`."""
        self._end = min(self._first + self._chunk, self._last)
        assert self._packet is not None
        assert self._rate_bps is not None
        self._chunk_bytes = self._packet.bytes_of(self._first, self._end)
        duration, self._remainder = divmod(self._chunk_bytes * 8 * NS_PER_S + self._remainder, self._rate_bps)
        self.finish = start + duration

    def _served_bytes(self, now: int) -> int:
        """Bytes of the chunk in service that have left by `now`."""
        if self.finish == FOREVER or self._rate_bps is None:
            return 0
        return self._chunk_bytes - (self.finish - now) * self._rate_bps // (8 * NS_PER_S)

    def _flush(self, now: int) -> None:
        """The limit is gone: everything queued leaves at once, in order."""
        if self._packet is not None:
            self._deliver(self._packet, self._first, self._last, now)
        for packet, last, _ in self._queue:
            self._deliver(packet, 0, last, now)
        self._queue.clear()
        self._packet = None
        self.queued_bytes = 0
        self.finish = FOREVER
