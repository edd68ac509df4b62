"""The TCP connections in a capture: whose they are, and the frames that crossed on them, in order, for the books."""

from collections import deque
from collections.abc import Iterator

from testbed.capture.books import Books, Connection, Passed
from testbed.capture.packets import ACK, SYN, Segment
from testbed.capture.stream import HalfStream
from workers.wire.dissect import Dissector, Piece

HTTP, OTHER = "http", "other"
MOST_WAITING = 100_000  # frames
_HTTP_BEGINS = (b"GET ", b"POST ", b"PUT ", b"HEAD ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"HTTP/1.", b"PRI * HTTP/2")


class Flow:
    """One connection: two half streams, and what their bytes are."""

    def __init__(self, books: "Books", segment: Segment) -> None:
        self._books = books
        self._source = segment.source
        self._target = segment.target
        self._halves = (HalfStream(), HalfStream())
        self._ends = (books.host_at(segment.source), books.host_at(segment.target))
        self._is_worker = books.is_worker_connection(segment)
        self._dissectors: list[Dissector | None] = [None, None]
        self._class = HTTP if books.is_gateway_port(segment) else None
        self._directions = ["", ""]
        self._busy_since_ns = [0, 0]
        self._given = [0, 0]  # payload bytes that are in pieces
        # pieces that wait for their acknowledgement, with the position of their end
        self._unacknowledged: tuple[deque[tuple[int, Piece, int]], ...] = (deque(), deque())

    def is_older_than(self, segment: Segment) -> bool:
        """Whether a SYN opens another connection between the same two ports."""
        half = self._halves[self._side(segment)]
        return half.unique_bytes > 0 or half.at_start

    def take(self, segment: Segment) -> None:
        side = self._side(segment)
        half = self._halves[side]
        if not self._directions[side]:
            self._directions[side] = self._books.direction_of(segment, self._ends[side], self._ends[1 - side])
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
        """The capture, or the connection, is over: settle the books."""
        self._books.connections.append(self._connection())
        for side, half in enumerate(self._halves):
            self._give(side, half.end())
            dissector = self._dissectors[side]
            if dissector is not None:
                self._note(side, dissector.end())
            self._settle(side, self._given[side], time_ns)
            if half.unique_bytes or half.retransmitted_bytes:
                facts = self._books.directions[self._directions[side]]
                facts.payload_bytes += half.unique_bytes
                facts.retransmitted_bytes += half.retransmitted_bytes
                facts.missed_bytes += half.missed_bytes
                if not self._is_worker:
                    self._books.classes[self._class or OTHER, self._directions[side]] += half.unique_bytes

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
            self._books.note(Passed(piece, busy_since_ns, time_ns), sender, receiver, self._directions[side])


class FlowTable:
    """The connections of one capture, found by their ends."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._flows: dict[tuple[tuple[bytes, int], tuple[bytes, int]], Flow] = {}
        self._now_ns = 0

    def take(self, segment: Segment) -> None:
        """One segment of the file."""
        self._now_ns = segment.time_ns
        key = (segment.source, segment.target)
        if key[0] > key[1]:
            key = (key[1], key[0])
        flow = self._flows.get(key)
        opens = segment.flags & (SYN | ACK) == SYN
        if flow is None or (opens and flow.is_older_than(segment)):
            if flow is not None:
                flow.close(segment.time_ns)
            flow = self._flows[key] = Flow(self._books, segment)
        flow.take(segment)

    def close(self) -> None:
        """The file is read: settle the books."""
        for flow in self._flows.values():
            flow.close(self._now_ns)
        self._flows.clear()
