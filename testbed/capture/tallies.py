"""The tallies of an audit: bytes by class, pair of workers, direction and request. Compares nothing; see `audit`."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from testbed.capture.context import Context, LabHost, Passage
from testbed.capture.counters import PairCount
from testbed.capture.packets import Segment
from workers.wire.dissect import UNKNOWN, Piece, request_of
from workers.wire.kv_messages import KvBegin, KvBlocks, KvEnd, KvReceived
from workers.wire.messages import TokenIds, Tokens

STARVED_NS = 200_000_000  # for so long a busy machine may keep a process between counting a frame and passing it on


class Passed(NamedTuple):
    """A frame, and how long it may have been on its way.

    It was handed to the kernel after `busy_since_ns`, when its connection had nothing unacknowledged, and arrived
    before `acknowledged_ns`.
    """

    piece: Piece
    busy_since_ns: int
    acknowledged_ns: int


@dataclass(slots=True)
class PairBytes:
    """Bytes of one class from one worker to another: in the whole file, and within each end's window."""

    total: int = 0
    frames: int = 0
    sent: int = 0
    received: int = 0
    head: int = 0  # of frames that had begun before the capture
    loose_head: int = 0  # thereof, what may have been counted since
    at_edges: int = 0  # of frames that may have been on their way when counters were read


@dataclass(slots=True)
class DirectionFacts:
    """TCP payload of one direction: bytes in all, bytes that crossed again, and bytes that the capture missed."""

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
    """One TCP connection, as far as sequence numbers tell, without payload."""

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


class Tallies:
    """The tallies of one capture. `counted` says when each pair (sender, receiver) was counted."""

    def __init__(self, context: Context, counted: Mapping[tuple[str, str], PairCount]) -> None:
        self._context = context
        self._counted = counted
        self._hosts = {host.address: host for host in context.hosts}
        self.pairs: dict[tuple[str, str, str], PairBytes] = defaultdict(PairBytes)  # sender, receiver, class
        self.classes: dict[tuple[str, str], int] = defaultdict(int)  # (class, direction) of what is not between workers
        self.directions: dict[str, DirectionFacts] = defaultdict(DirectionFacts)
        self.requests: dict[str, RequestBytes] = defaultdict(RequestBytes)
        self.transfers: dict[str, Transfer] = {}
        self.connections: list[Connection] = []

    # -- asked by a connection --------------------------------------------------------------------------------------

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
        """The direction of a segment, as the rows of a table name it."""
        if sender is not None and receiver is not None:
            passage = self._context.passage(sender, receiver)
            if passage is not None:
                return passage.direction
        return self.direction_at(segment.interface, segment.arriving)

    def direction_at(self, interface: int, arriving: bool) -> str:
        """The direction of a packet that passes an interface of the capture."""
        if interface < len(self._context.interfaces):
            return self._context.interfaces[interface][arriving]
        return "elsewhere"

    # -- told by a connection -------------------------------------------------------------------------------------

    def note(self, passed: Passed, sender: LabHost, receiver: LabHost, direction: str) -> None:
        """One frame, or bytes of none."""
        piece = passed.piece
        pair = self.pairs[sender.name, receiver.name, piece.traffic]
        pair.total += piece.size
        pair.frames += piece.traffic != UNKNOWN
        count = self._counted.get((sender.name, receiver.name))
        if piece.is_head:
            pair.head += piece.size
            if count is None or not count.begins_level:  # else it had arrived before anything was counted
                pair.at_edges += piece.size
                pair.loose_head += piece.size
        elif count is not None:
            self._place(passed, pair, count, self._context.passage(sender, receiver))
        name = request_of(piece.message)
        if name is not None:
            self._note_request(name, piece, sender.name, receiver.name, direction)

    @staticmethod
    def _place(passed: Passed, pair: PairBytes, count: PairCount, passage: Passage | None) -> None:
        """Count a frame at either end where it crossed while that end counted."""
        before_ns, after_ns = (0, 0) if passage is None else (passage.before_ns, passage.after_ns)
        begin, end = count.sent_within
        time_ns, size = passed.piece.time_ns, passed.piece.size
        if begin <= time_ns - before_ns <= end:
            pair.sent += size
        if count.received_within[0] <= time_ns + after_ns <= count.received_within[1]:
            pair.received += size
        earliest_ns = min(passed.busy_since_ns, time_ns) - before_ns - STARVED_NS
        latest_ns = max(passed.acknowledged_ns, time_ns + after_ns) + STARVED_NS
        edges: list[int] = []
        if not count.begins_level:
            edges += (begin, count.received_within[0])
        if not count.ends_level:
            edges += (end, count.received_within[1])
        if any(earliest_ns <= edge <= latest_ns for edge in edges):
            pair.at_edges += max(size, passed.piece.frame_size)

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
