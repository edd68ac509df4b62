"""A capture held against the workers' own counts: rows by class and direction, by request, and a verdict.

Pure but for reading the file and the notes. Counters are compared over the time between two readings inside the
capture (see `counters.count_pair`); both the sender's and the receiver's count are held against the packets.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from testbed.capture import counters, pcapng
from testbed.capture.context import Context, LabHost
from testbed.capture.counters import PairCount, Window, count_pair
from testbed.capture.packets import FileFacts, read_segments
from testbed.capture.tallies import Connection, DirectionFacts, PairBytes, RequestBytes, Tallies
from testbed.capture.tcp import ConnectionTable
from workers.wire.dissect import UNKNOWN
from workers.wire.frames import CLASSES

TOLERANCE = 0.01
TOTAL = "all frames"
_WORTH_TELLING_NS = 2_000_000_000
Counted = Mapping[tuple[str, str], PairCount]  # by sender and receiver


@dataclass(frozen=True, slots=True)
class ClassRow:
    """Bytes of one class in one direction. None: not counted by anybody."""

    traffic: str
    direction: str
    in_file: int  # in the whole capture
    captured: int | None = None  # while the senders counted
    counted: int | None = None  # by the senders
    captured_for_receivers: int | None = None
    received: int | None = None  # counted by the receivers
    at_edges: int = 0  # may have been on their way when counters were read
    loose_head: int = 0  # at_edges, of frames whose size is not known because they had begun before the capture
    judged: bool = False  # False where the payload does not tell the class

    @property
    def difference(self) -> float | None:
        """The larger relative difference, against what was counted."""
        if self.counted is None or self.captured is None:
            return None
        differences = [relative(self.captured, self.counted)]
        if self.received is not None and self.captured_for_receivers is not None:
            differences.append(relative(self.captured_for_receivers, self.received))
        return max(differences, key=abs)

    @property
    def ok(self) -> bool:
        if not self.judged or self.difference is None:
            return True
        return abs(self.difference) <= TOLERANCE and not self._is_vacuous

    @property
    def _is_vacuous(self) -> bool:
        """Something crossed, and none of it while it was counted."""
        return self.in_file + self.at_edges > 0 and not (self.captured or self.counted or self.received)

    @property
    def undecided(self) -> bool:
        """Not `ok`, and all of it may be frames that crossed while the counters were read."""
        if not self.ok and (self.loose_head or self._is_vacuous):
            return True
        pairs = ((self.captured, self.counted), (self.captured_for_receivers, self.received))
        return not self.ok and all(
            abs((captured or 0) - (counted or 0)) <= self.at_edges for captured, counted in pairs
        )


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request: KV of blocks captured and recorded (None: nothing to compare), and all its frames."""

    request: str
    kv_bytes: int
    recorded_kv_bytes: int | None
    token_ids: Mapping[str, int]  # by direction
    bytes: Mapping[str, Mapping[str, int]]  # class -> direction -> bytes

    @property
    def ok(self) -> bool:
        recorded = self.recorded_kv_bytes
        return recorded is None or abs(relative(self.kv_bytes, recorded)) <= TOLERANCE


@dataclass
class Audit:
    """The whole result."""

    context: Context
    facts: FileFacts
    dropped: int | None  # packets that the capture lost; None: not known
    rows: list[ClassRow] = field(default_factory=list)
    directions: dict[str, DirectionFacts] = field(default_factory=dict)
    connections: list[Connection] = field(default_factory=list)
    other_packets: dict[str, int] = field(default_factory=dict)  # not TCP, by direction
    requests: list[RequestRow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # any of them fails the audit
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems and all(row.ok for row in self.rows) and all(row.ok for row in self.requests)


def relative(captured: int, counted: int) -> float:
    """(captured - counted) / counted; infinite where nothing was counted."""
    if captured == counted:
        return 0.0
    return (captured - counted) / counted if counted else float("inf")


def audit(file: Path, context: Context, records: Path | None) -> Audit:
    """Read and compare; without `records`, only classify. Raises UnreadableCapture, BadCounters."""
    accounts = pcapng.read_statistics(file)
    begin_ns, end_ns = _span(file, context, accounts)
    counted = {} if records is None else _counted(context, records, (begin_ns, end_ns))
    tallies, facts = Tallies(context, counted), FileFacts()
    connections = ConnectionTable(tallies)
    for segment in read_segments(file, facts):
        connections.take(segment)
    connections.close()
    result = Audit(context, facts, sum(account.dropped for account in accounts) if accounts else None)
    result.directions = dict(tallies.directions)
    result.connections = tallies.connections
    for (interface, arriving), packets in facts.other_packets.items():
        direction = tallies.direction_at(interface, arriving)
        result.other_packets[direction] = result.other_packets.get(direction, 0) + packets
    result.rows = [*_worker_rows(context, tallies, counted if records is not None else None), *_plain_rows(tallies)]
    result.requests = _request_rows(tallies, None if records is None else records / "requests.jsonl")
    if records is not None:
        result.problems += _uncounted(context, tallies, counted)
    result.notes += _notes(result, counted, begin_ns, end_ns)
    return result


def _span(file: Path, context: Context, accounts: list[pcapng.Statistics]) -> tuple[int, int]:
    """The time in which everything was captured, Unix nanoseconds; from the packets where the file does not say."""
    if accounts:
        return max(account.begun_ns for account in accounts), min(account.ended_ns for account in accounts)
    facts = FileFacts()
    for _ in read_segments(file, facts):
        pass
    return context.begun_ns or facts.first_ns or 0, facts.last_ns or 0


def _counted(context: Context, records: Path, within: Window) -> Counted:
    notes = counters.read_notes(records)
    pairs = {}
    for sender in context.hosts:
        for receiver in context.hosts:
            passage = None if sender is receiver else context.passage(sender, receiver)
            if passage is None:
                continue
            ends = (notes.get(sender.name, []), notes.get(receiver.name, []))
            count = count_pair(*ends, within, passage.before_ns, passage.after_ns)
            if count is not None:
                pairs[sender.name, receiver.name] = count
    return pairs


def _pairs(context: Context, tallies: Tallies) -> Iterator[tuple[LabHost, LabHost, str]]:
    """Workers whose traffic must be in the file, with its direction; those seen, where that is not known."""
    seen = {(sender, receiver) for sender, receiver, _ in tallies.pairs}
    workers = [host for host in context.hosts if host.role]
    for sender in workers:
        for receiver in workers:
            passage = None if sender is receiver else context.passage(sender, receiver)
            if passage is None or (context.passages is None and (sender.name, receiver.name) not in seen):
                continue
            yield sender, receiver, passage.direction


def _worker_rows(context: Context, tallies: Tallies, counted: Counted | None) -> list[ClassRow]:
    by_direction: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for sender, receiver, direction in _pairs(context, tallies):
        by_direction[direction].append((sender.name, receiver.name))
    rows = []
    for direction, pairs in by_direction.items():
        unknown = [tallies.pairs.get((*pair, UNKNOWN), PairBytes()) for pair in pairs]
        untold = any(entry.total > entry.head for entry in unknown)
        rows += [
            _row(traffic, (traffic,), direction, pairs, tallies, counted, judged=not untold) for traffic in CLASSES
        ]
        if any(entry.total for entry in unknown):
            rows.append(_row(UNKNOWN, (UNKNOWN,), direction, pairs, tallies, None, judged=False))
        everything = (*CLASSES, UNKNOWN)
        rows.append(_row(TOTAL, everything, direction, pairs, tallies, counted, judged=True))
    return rows


def _row(
    traffic: str,
    classes: tuple[str, ...],
    direction: str,
    pairs: list[tuple[str, str]],
    tallies: Tallies,
    counted: Counted | None,
    *,
    judged: bool,
) -> ClassRow:
    seen = {
        pair: [tallies.pairs[(*pair, name)] for name in classes if (*pair, name) in tallies.pairs] for pair in pairs
    }
    everything = [entry for entries in seen.values() for entry in entries]
    in_file, at_edges = sum(entry.total for entry in everything), sum(entry.at_edges for entry in everything)
    unknown = [tallies.pairs[(*pair, UNKNOWN)] for pair in pairs if (*pair, UNKNOWN) in tallies.pairs]
    if UNKNOWN not in classes:  # a frame that had begun before the capture may be of this class
        at_edges += sum(entry.at_edges for entry in unknown)
    if counted is None:
        return ClassRow(traffic, direction, in_file)
    known = [pair for pair in pairs if pair in counted]
    compared = [entry for pair in known for entry in seen[pair]]
    return ClassRow(
        traffic,
        direction,
        in_file,
        captured=sum(entry.sent for entry in compared),
        counted=sum(counted[pair].sent.get(name, 0) for pair in known for name in classes),
        captured_for_receivers=sum(entry.received for entry in compared),
        received=sum(counted[pair].received.get(name, 0) for pair in known for name in classes),
        at_edges=at_edges,
        loose_head=sum(entry.loose_head for entry in unknown),
        judged=judged,
    )


def _plain_rows(tallies: Tallies) -> list[ClassRow]:
    return [ClassRow(traffic, direction, size) for (traffic, direction), size in sorted(tallies.classes.items())]


def _uncounted(context: Context, tallies: Tallies, counted: Counted) -> Iterator[str]:
    """Workers that took part and whose counters say nothing about the time of the capture."""
    for sender, receiver, _ in _pairs(context, tallies):
        pair = (sender.name, receiver.name)
        if pair not in counted and any((*pair, name) in tallies.pairs for name in (*CLASSES, UNKNOWN)):
            yield f"{pair[0]} or {pair[1]} noted its counters less than twice during the capture: nothing to compare"


def _request_rows(tallies: Tallies, records: Path | None) -> list[RequestRow]:
    recorded = {} if records is None or not records.exists() else dict(_recorded_kv(records))
    # where the answers to transfers were not captured, nobody can tell which of them were completed
    answers = any(transfer.received for transfer in tallies.transfers.values())
    kv: dict[str, dict[tuple[str, str], int]] = defaultdict(dict)
    torn = set()
    for transfer in tallies.transfers.values():
        if transfer.begun and transfer.received:
            ends = (transfer.sender, transfer.receiver)
            kv[transfer.request][ends] = kv[transfer.request].get(ends, 0) + transfer.kv_bytes
        elif answers and (transfer.received or not transfer.ended):
            torn.add(transfer.request)
    rows = []
    for name, request in tallies.requests.items():
        spans = recorded.get(name)
        compared = None
        if spans is not None and answers and name not in torn and kv[name]:
            compared = sum(spans.get(ends, 0) for ends in kv[name])
        rows.append(_request_row(name, request, sum(kv[name].values()), compared))
    return rows


def _request_row(name: str, request: RequestBytes, kv_bytes: int, recorded: int | None) -> RequestRow:
    by_class: dict[str, dict[str, int]] = {}
    for (traffic, direction), size in sorted(request.bytes.items()):
        by_class.setdefault(traffic, {})[direction] = size
    return RequestRow(name, kv_bytes, recorded, dict(request.ids), by_class)


def _recorded_kv(requests: Path) -> Iterator[tuple[str, dict[tuple[str, str], int]]]:
    """Per request of requests.jsonl: bytes of KV by (sender, receiver), as the senders reported them."""
    for line in requests.read_text().splitlines():
        record = json.loads(line)
        spans: dict[tuple[str, str], int] = {}
        for span in record.get("pdd_spans", []):
            if span["name"].endswith("-transfer"):
                ends = (span["instance"], span["peer"])
                spans[ends] = spans.get(ends, 0) + span.get("bytes", 0)
        yield record["request_id"], spans


def _notes(result: Audit, counted: Counted, begin_ns: int, end_ns: int) -> Iterator[str]:
    """Notes for the reader of the table."""
    if result.dropped is None:
        yield "the file does not say how many packets the capture dropped (it did not end properly, or is not ours)"
    elif result.dropped:
        yield f"the capture dropped {result.dropped} packets"
    missed = sum(facts.missed_bytes for facts in result.directions.values())
    if missed:
        yield f"{missed} bytes were acknowledged and are not in the file; they are included by their sequence numbers"
    if any(row.traffic in CLASSES and not row.judged for row in result.rows):
        yield ("where the payload was not captured, frames have no class: only the sum of all frames is compared there")
    if counted:
        first = max(count.sent_within[0] for count in counted.values()) - begin_ns
        last = end_ns - min(count.sent_within[1] for count in counted.values())
        if max(first, last) > _WORTH_TELLING_NS:
            yield (
                f"the counters were first read {first / 1e9:.1f} s after the capture's begin and last "
                f"{last / 1e9:.1f} s before its end: only what lies between is compared"
            )
