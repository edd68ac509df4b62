"""The TCP connections in a capture: each direction put in order, and the frames that crossed, for the tallies.

Works on sequence numbers alone where payload was not captured. Bytes that came twice are counted apart; gaps are known.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from testbed.capture.packets import ACK, SYN, Segment
from testbed.capture.tallies import Connection, Passed, Tallies
from workers.wire.dissect import Dissector, Piece

_MODULUS = 1 << 32
_HALF = 1 << 31
# A gap that the receiver has acknowledged was missed by the capture. Files that are not sorted show acknowledgements
# early: the rest of this time lets the segment come.
GRACE_NS = 200_000_000
PENDING_BYTES = 64 << 20  # kept behind a gap that nobody acknowledges (only one direction was captured)

HTTP, OTHER = "http", "other"
MOST_WAITING = 100_000  # frames
_HTTP_BEGINS = (b"GET ", b"POST ", b"PUT ", b"HEAD ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"HTTP/1.", b"PRI * HTTP/2")

# (time, first position, size, captured bytes): bytes beyond those captured are unknown
Run = tuple[int, int, int, bytes]
_position = itemgetter(1)


@dataclass(slots=True)
class HalfStream:
    """One direction of a connection: takes segments and the other direction's acknowledgements, gives bytes in order.

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
        """True when the receiver has acknowledged everything that was seen."""
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


class TcpConnection:
    """One connection: two half streams, and the frames in their bytes."""

    def __init__(self, tallies: "Tallies", segment: Segment) -> None:
        self._tallies = tallies
        self._source = segment.source
        self._target = segment.target
        self._halves = (HalfStream(), HalfStream())
        self._ends = (tallies.host_at(segment.source), tallies.host_at(segment.target))
        self._is_worker = tallies.is_worker_connection(segment)
        self._dissectors: list[Dissector | None] = [None, None]
        self._class = HTTP if tallies.is_gateway_port(segment) else None
        self._directions = ["", ""]
        self._busy_since_ns = [0, 0]
        self._given = [0, 0]  # payload bytes that are in pieces
        # pieces that wait for their acknowledgement, with the position of their end
        self._unacknowledged: tuple[deque[tuple[int, Piece, int]], ...] = (deque(), deque())

    def is_older_than(self, segment: Segment) -> bool:
        """True when a SYN opens another connection between the same two ports."""
        half = self._halves[self._side(segment)]
        return half.unique_bytes > 0 or half.at_start

    def take(self, segment: Segment) -> None:
        side = self._side(segment)
        half = self._halves[side]
        if not self._directions[side]:
            self._directions[side] = self._tallies.direction_of(segment, self._ends[side], self._ends[1 - side])
        if segment.flags & SYN:
            half.open(segment.sequence)
        if segment.size:
            if half.is_idle():
                # the first bytes seen may be a retransmission of some that were sent before the capture
                known = half.at_start or half.unique_bytes > 0
                self._busy_since_ns[side] = segment.time_ns if known else 0
            self._give(side, half.add(segment.time_ns, segment.sequence, segment.size, segment.data))
        if segment.acknowledged is not None:
            self._give(1 - side, self._halves[1 - side].acknowledge(segment.time_ns, segment.acknowledged))
            self._settle(1 - side, self._halves[1 - side].acknowledged, segment.time_ns)

    def close(self, time_ns: int) -> None:
        """The capture, or the connection, is over: close the tallies."""
        self._tallies.connections.append(self._connection())
        for side, half in enumerate(self._halves):
            self._give(side, half.end())
            dissector = self._dissectors[side]
            if dissector is not None:
                self._note(side, dissector.end())
            self._settle(side, self._given[side], time_ns)
            if half.unique_bytes or half.retransmitted_bytes:
                facts = self._tallies.directions[self._directions[side]]
                facts.payload_bytes += half.unique_bytes
                facts.retransmitted_bytes += half.retransmitted_bytes
                facts.missed_bytes += half.missed_bytes
                if not self._is_worker:
                    self._tallies.classes[self._class or OTHER, self._directions[side]] += half.unique_bytes

    def _connection(self) -> Connection:
        names = []
        for host, (address, port) in zip(self._ends, (self._source, self._target), strict=True):
            names.append(f"{host.name if host else '.'.join(map(str, address))}:{port}")
        sizes = [half.unique_bytes for half in self._halves]
        return Connection(names[0], names[1], self._is_worker, sizes[0], sizes[1])

    def _side(self, segment: Segment) -> int:
        return 0 if segment.source == self._source else 1

    def _give(self, side: int, runs: Iterator[tuple[int, int, bytes]]) -> None:
        for time_ns, size, data in runs:
            if not self._is_worker:
                if self._class is None and data:
                    self._class = HTTP if data.startswith(_HTTP_BEGINS) else OTHER
                continue
            dissector = self._dissectors[side]
            if dissector is None:
                dissector = self._dissectors[side] = Dissector(at_start=self._halves[side].at_start)
            if data:
                self._note(side, dissector.feed(time_ns, data))
            if size > len(data):
                self._note(side, dissector.skip(time_ns, size - len(data)))

    def _note(self, side: int, pieces: Iterator[Piece]) -> None:
        waiting = self._unacknowledged[side]
        for piece in pieces:
            self._given[side] += piece.size
            waiting.append((self._given[side], piece, self._busy_since_ns[side]))
            if len(waiting) > MOST_WAITING:  # only one direction was captured
                self._settle(side, waiting[0][0], piece.time_ns)

    def _settle(self, side: int, position: int, time_ns: int) -> None:
        """Note the pieces whose last byte was acknowledged."""
        sender, receiver = self._ends[side], self._ends[1 - side]
        waiting = self._unacknowledged[side]
        while waiting and waiting[0][0] <= position:
            assert sender is not None
            assert receiver is not None
            _, piece, busy_since_ns = waiting.popleft()
            self._tallies.note(Passed(piece, busy_since_ns, time_ns), sender, receiver, self._directions[side])


class ConnectionTable:
    """The connections of one capture, found by their ends."""

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self._connections: dict[tuple[tuple[bytes, int], tuple[bytes, int]], TcpConnection] = {}
        self._now_ns = 0

    def take(self, segment: Segment) -> None:
        """One segment of the file."""
        self._now_ns = segment.time_ns
        key = (segment.source, segment.target)
        if key[0] > key[1]:
            key = (key[1], key[0])
        connection = self._connections.get(key)
        opens = segment.flags & (SYN | ACK) == SYN
        if connection is None or (opens and connection.is_older_than(segment)):
            if connection is not None:
                connection.close(segment.time_ns)
            connection = self._connections[key] = TcpConnection(self._tallies, segment)
        connection.take(segment)

    def close(self) -> None:
        """The file is read: close the tallies."""
        for connection in self._connections.values():
            connection.close(self._now_ns)
        self._connections.clear()
