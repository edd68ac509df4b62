"""One direction of a TCP connection as unique payload bytes: what came twice is counted apart, gaps are known.

Pure. Works on sequence numbers alone where payload was not captured.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter

_MODULUS = 1 << 32
_HALF = 1 << 31
# A gap that the receiver has acknowledged was missed by the capture. Files that are not sorted show acknowledgements
# early: the rest of this time lets the segment come.
GRACE_NS = 200_000_000
PENDING_BYTES = 64 << 20  # kept behind a gap that nobody acknowledges (only one direction was captured)

# (time, first position, size, captured bytes): bytes beyond those captured are unknown
Run = tuple[int, int, int, bytes]
_position = itemgetter(1)


@dataclass(slots=True)
class HalfStream:
    """Feed segments and the other direction's acknowledgements; take runs of bytes in order.

    Positions count from the first payload byte seen (or the first after SYN). What precedes it was sent before the
    capture began: here it can only be a retransmission.
    """

    unique_bytes: int = 0
    retransmitted_bytes: int = 0
    missed_bytes: int = 0  # acknowledged by the receiver, not in the capture
    at_start: bool = False  # SYN was seen: position 0 is the connection's first byte
    _first: int | None = None
    _end: int = 0  # of everything seen
    _next: int = 0  # everything before has been given out
    _waiting: list[Run] = field(default_factory=list)  # beyond a gap, sorted, without overlap
    _waiting_bytes: int = 0
    acknowledged: int = 0  # position up to which the receiver is known to have everything
    _acknowledged_ns: int = 0

    def open(self, sequence: int) -> None:
        """A SYN: payload begins one later."""
        if self._first is None:
            self._first = (sequence + 1) % _MODULUS
            self.at_start = True

    def add(self, time_ns: int, sequence: int, size: int, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """A segment's payload; yields (time, size, captured bytes) of what is now known without a gap before it."""
        if self._first is None:
            self._first = sequence
        begin = self._unwrap(sequence)
        self._end = max(self._end, begin + size)
        for run in list(self._new(time_ns, begin, begin + size, data)):
            self.unique_bytes += run[2]
            insort(self._waiting, run, key=_position)
            self._waiting_bytes += len(run[3])
        yield from self._ripe(time_ns)

    def acknowledge(self, time_ns: int, sequence: int) -> Iterator[tuple[int, int, bytes]]:
        """The receiver has everything before `sequence`; yields as `add`, gaps as bytes that were not captured."""
        if self._first is None:
            return
        position = self._unwrap(sequence)
        if position > self.acknowledged:
            self.acknowledged, self._acknowledged_ns = position, time_ns
        yield from self._ripe(time_ns)

    def is_idle(self) -> bool:
        """Whether the receiver has acknowledged everything that was seen."""
        return self.acknowledged >= self._end

    def end(self) -> Iterator[tuple[int, int, bytes]]:
        """The capture is over: what still waits behind gaps."""
        while self._waiting:
            yield self._missed()
            yield from self._take()

    def _ripe(self, time_ns: int) -> Iterator[tuple[int, int, bytes]]:
        yield from self._take()
        while self._waiting:
            gap_ends = self._waiting[0][1]
            lost = self.acknowledged >= gap_ends and time_ns - self._acknowledged_ns > GRACE_NS
            if not lost and self._waiting_bytes <= PENDING_BYTES:
                return
            yield self._missed()
            yield from self._take()

    def _take(self) -> Iterator[tuple[int, int, bytes]]:
        """Runs that follow without a gap."""
        taken = 0
        for time_ns, begin, size, data in self._waiting:
            if begin != self._next:
                break
            taken += 1
            self._next += size
            self._waiting_bytes -= len(data)
            yield time_ns, size, data
        del self._waiting[:taken]

    def _missed(self) -> tuple[int, int, bytes]:
        """The gap before the first waiting run, given up."""
        time_ns, begin, _, _ = self._waiting[0]
        size = begin - self._next
        self._next = begin
        self.missed_bytes += size
        return time_ns, size, b""

    def _new(self, time_ns: int, begin: int, end: int, data: bytes) -> Iterator[Run]:
        """The parts of [begin, end) not seen before; the others are counted as retransmitted."""
        known = min(max(0, self._next - begin), end - begin)
        self.retransmitted_bytes += known
        at = begin + known
        for _, other, size, _ in self._waiting:
            if other + size <= at:
                continue
            if other >= end:
                break
            if other > at:
                yield time_ns, at, other - at, data[at - begin : other - begin]
            overlap = min(end, other + size) - max(at, other)
            self.retransmitted_bytes += overlap
            at = max(at, other) + overlap
        if at < end:
            yield time_ns, at, end - at, data[at - begin : end - begin]

    def _unwrap(self, sequence: int) -> int:
        """Position of a 32-bit sequence number: the one nearest to where the stream is."""
        assert self._first is not None
        offset = (sequence - self._first - self._next) % _MODULUS
        return self._next + (offset if offset < _HALF else offset - _MODULUS)
