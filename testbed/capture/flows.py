"""From TCP segments to bytes by class: whose connection it is, which frames crossed on it, for which request.

Owns the table of connections and the tallies. Compares nothing; see `compare`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from testbed.capture.context import Context, LabHost, Passage
from testbed.capture.counters import PairCount
from testbed.capture.packets import ACK, SYN, Segment
from testbed.capture.stream import HalfStream
from workers.wire.dissect import UNKNOWN, Dissector, Piece, request_of
from workers.wire.messages import KvBegin, KvBlocks, KvEnd, KvReceived, TokenIds, Tokens

HTTP, OTHER = "http", "other"
_HTTP_BEGINS = (b"GET ", b"POST ", b"PUT ", b"HEAD ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"HTTP/1.", b"PRI * HTTP/2")
EDGE_NS = 50_000_000


@dataclass(slots=True)
class PairBytes:
    """Bytes of one class from one worker to another: in the whole file, and within each end's window."""

    total: int = 0
    frames: int = 0
    sent: int = 0
    received: int = 0
    at_edges: int = 0  # of frames that crossed while counters were read and traffic flowed: on either side of it


@dataclass(slots=True)
class DirectionFacts:
    """What is not a class: TCP payload that crossed again, and what the capture missed."""

    payload_bytes: int = 0
    retransmitted_bytes: int = 0
    missed_bytes: int = 0


@dataclass(slots=True)
class Transfer:
    """One attempt to send a request's KV."""

    request: str
    sender: str
    receiver: str
    begun: bool = False
    ended: bool = False
    received: bool = False
    kv_bytes: int = 0  # of block storage: bodies alone


@dataclass(frozen=True, slots=True)
class Connection:
    """One TCP connection, as far as sequence numbers tell: what there is to know without payload."""

    source: str  # HOST:PORT, or ADDRESS:PORT
    target: str
    between_workers: bool
    source_bytes: int  # payload from the source
    target_bytes: int


@dataclass
class RequestBytes:
    """One request's frames: bytes by (class, direction), token ids by direction."""

    bytes: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    ids: dict[str, int] = field(default_factory=lambda: defaultdict(int))


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
            self._give(side, half.add(segment.time_ns, segment.sequence, segment.size, segment.data))
        if segment.acknowledged is not None:
            self._give(1 - side, self._halves[1 - side].acknowledge(segment.time_ns, segment.acknowledged))

    def close(self, time_ns: int) -> None:
        """The capture, or the connection, is over: settle the books."""
        self._books.connections.append(self._connection())
        for side, half in enumerate(self._halves):
            self._give(side, half.end())
            dissector = self._dissectors[side]
            if dissector is not None:
                self._note(side, dissector.end(time_ns))
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
        sender, receiver = self._ends[side], self._ends[1 - side]
        assert sender is not None
        assert receiver is not None
        for piece in pieces:
            self._books.note(piece, sender, receiver, self._directions[side])


class Books:
    """Everything that was learnt from one capture. `counted` says when each pair (sender, receiver) was counted."""

    def __init__(self, context: Context, counted: Mapping[tuple[str, str], PairCount]) -> None:
        self._context = context
        self._counted = counted
        self._hosts = {host.address: host for host in context.hosts}
        self._flows: dict[tuple[tuple[bytes, int], tuple[bytes, int]], Flow] = {}
        self._now_ns = 0
        self.pairs: dict[tuple[str, str, str], PairBytes] = defaultdict(PairBytes)  # sender, receiver, class
        self.classes: dict[tuple[str, str], int] = defaultdict(int)  # (class, direction) of what is not between workers
        self.directions: dict[str, DirectionFacts] = defaultdict(DirectionFacts)
        self.requests: dict[str, RequestBytes] = defaultdict(RequestBytes)
        self.transfers: dict[str, Transfer] = {}
        self.connections: list[Connection] = []

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
            flow = self._flows[key] = Flow(self, segment)
        flow.take(segment)

    def close(self) -> None:
        """The file is read."""
        for flow in self._flows.values():
            flow.close(self._now_ns)
        self._flows.clear()

    # -- what a flow asks --------------------------------------------------------------------------------------

    def host_at(self, end: tuple[bytes, int]) -> LabHost | None:
        return self._hosts.get(".".join(map(str, end[0])))

    def is_worker_connection(self, segment: Segment) -> bool:
        """Between two workers, one of which listens on the port (a gateway listens for HTTP only)."""
        ends = [(self.host_at(end), end[1]) for end in (segment.source, segment.target)]
        workers = all(host is not None and host.role for host, _ in ends)
        return workers and self._listens(ends, lambda role: role != "gateway")

    def is_gateway_port(self, segment: Segment) -> bool:
        ends = [(self.host_at(end), end[1]) for end in (segment.source, segment.target)]
        return self._listens(ends, lambda role: role == "gateway")

    @staticmethod
    def _listens(ends: list[tuple[LabHost | None, int]], wanted: Callable[[str | None], bool]) -> bool:
        return any(host is not None and host.port == port and wanted(host.role) for host, port in ends)

    def direction_of(self, segment: Segment, sender: LabHost | None, receiver: LabHost | None) -> str:
        """What the rows of a table call the way of a segment."""
        if sender is not None and receiver is not None:
            passage = self._context.passage(sender, receiver)
            if passage is not None:
                return passage.direction
        return self.direction_at(segment.interface, segment.arriving)

    def direction_at(self, interface: int, arriving: bool) -> str:
        """The way of whatever passes an interface of the capture."""
        if interface < len(self._context.interfaces):
            return self._context.interfaces[interface][arriving]
        return "elsewhere"

    # -- what a flow tells -------------------------------------------------------------------------------------

    def note(self, piece: Piece, sender: LabHost, receiver: LabHost, direction: str) -> None:
        """One frame, or bytes of none."""
        pair = self.pairs[sender.name, receiver.name, piece.traffic]
        pair.total += piece.size
        pair.frames += piece.traffic != UNKNOWN
        count = self._counted.get((sender.name, receiver.name))
        if count is not None:
            self._place(piece, pair, count, self._context.passage(sender, receiver))
        name = request_of(piece.message)
        if name is not None:
            self._note_request(name, piece, sender.name, receiver.name, direction)

    @staticmethod
    def _place(piece: Piece, pair: PairBytes, count: PairCount, passage: Passage | None) -> None:
        """Whether a frame crossed while it was counted, at either end."""
        before_ns, after_ns = (0, 0) if passage is None else (passage.before_ns, passage.after_ns)
        begin, end = count.sent_within
        sent_ns = piece.time_ns - before_ns
        if begin <= sent_ns <= end:
            pair.sent += piece.size
        if count.received_within[0] <= piece.time_ns + after_ns <= count.received_within[1]:
            pair.received += piece.size
        for edge, level in ((begin, count.begins_level), (end, count.ends_level)):
            if not level and sent_ns - EDGE_NS <= edge <= piece.last_ns + after_ns + EDGE_NS:
                pair.at_edges += piece.size

    def _note_request(self, name: str, piece: Piece, sender: str, receiver: str, direction: str) -> None:
        request, message = self.requests[name], piece.message
        request.bytes[piece.traffic, direction] += piece.size
        if isinstance(message, TokenIds | Tokens):
            request.ids[direction] += len(message.ids)
        elif isinstance(message, KvBegin | KvBlocks | KvEnd):
            transfer = self.transfers.setdefault(message.transfer, Transfer(name, sender, receiver))
            transfer.begun |= isinstance(message, KvBegin)
            transfer.ended |= isinstance(message, KvEnd)
            transfer.kv_bytes += piece.body_bytes
        elif isinstance(message, KvReceived):
            self.transfers.setdefault(message.transfer, Transfer(name, receiver, sender)).received = True
