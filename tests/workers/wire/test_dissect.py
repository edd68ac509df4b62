"""Frames found in captured bytes: cut anywhere, begun anywhere, with holes."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from workers.wire import frames
from workers.wire.codec import encode, kind_of
from workers.wire.dissect import UNKNOWN, Dissector, Piece, request_of
from workers.wire.kv_messages import KvBegin, KvBlocks, KvReceived
from workers.wire.messages import Message, Ping, RequestSpec, SamplingSpec, Tokens

SPEC = RequestSpec(
    id="cmpl-1",
    gateway="gw0",
    prefill="p0",
    relay=None,
    main="md0",
    prompt=[1, 2, 3],
    sampling=SamplingSpec(max_tokens=4),
    deadline_s=9.0,
)
MESSAGES: list[tuple[Message, int]] = [
    (Ping(sent_ns=5), 0),
    (Tokens(request="cmpl-2", position=9, ids=[7, 8]), 0),
    (KvBegin(transfer="cmpl-1.aa", spec=SPEC, first_block=0, tokens=3), 0),
    (KvBlocks(transfer="cmpl-1.aa", first_block=0, tokens=[3], checksums=[2**63]), 500),
    (KvReceived(transfer="cmpl-1.aa", received_ns=1), 0),
]


def _frame(number: int) -> bytes:
    message, body_bytes = MESSAGES[number]
    body = (b"PDDB" * 200)[:body_bytes]  # the magic itself, again and again: what KV may hold by chance
    return frames.pack(kind_of(message), encode(message), body_bytes) + body


def _feed(dissector: Dissector, data: bytes, cuts: list[int]) -> list[Piece]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    pieces = [
        piece
        for number, (begin, end) in enumerate(itertools.pairwise(edges))
        for piece in dissector.feed(number, data[begin:end])
    ]
    return pieces + list(dissector.end())


numbers = st.lists(st.integers(0, len(MESSAGES) - 1), max_size=12)
cuts = st.lists(st.integers(0, 4000), max_size=40)


@given(numbers=numbers, cuts=cuts)
def test_frames_are_found_however_segments_cut_them(numbers, cuts) -> None:
    stream = [_frame(number) for number in numbers]
    pieces = _feed(Dissector(at_start=True), b"".join(stream), cuts)
    assert [piece.message for piece in pieces] == [MESSAGES[number][0] for number in numbers]
    assert [piece.size for piece in pieces] == [len(frame) for frame in stream]
    assert [piece.body_bytes for piece in pieces] == [MESSAGES[number][1] for number in numbers]
    assert all(piece.frame_size == piece.size for piece in pieces)


@given(numbers=numbers, cuts=cuts, start=st.integers(0, 700))
def test_a_capture_that_begins_inside_a_frame_finds_the_next_one(numbers, cuts, start) -> None:
    first = _frame(3)
    stream = first[start % len(first) :] + b"".join(_frame(number) for number in numbers)
    pieces = _feed(Dissector(), stream, cuts)
    assert sum(piece.size for piece in pieces) == len(stream)
    assert all(piece.is_head for piece in pieces if piece.traffic == UNKNOWN)
    found = [piece.message for piece in pieces if piece.traffic != UNKNOWN]
    expected = [MESSAGES[number][0] for number in numbers]
    assert found == ([MESSAGES[3][0], *expected] if start % len(first) == 0 else expected)


@given(numbers=numbers, hole=st.tuples(st.integers(0, 3000), st.integers(1, 600)))
def test_bytes_without_content_are_all_accounted_for(numbers, hole) -> None:
    stream = b"".join(_frame(number) for number in [*numbers, 1])
    begin = hole[0] % len(stream)
    end = min(len(stream), begin + hole[1])
    dissector = Dissector(at_start=True)
    pieces = [*dissector.feed(0, stream[:begin]), *dissector.skip(1, end - begin), *dissector.feed(2, stream[end:])]
    pieces += dissector.end()
    assert sum(piece.size for piece in pieces) == len(stream)
    # nothing is invented: what is called a frame was sent, in this order
    sent = iter([(piece.traffic, piece.size) for piece in _feed(Dissector(at_start=True), stream, [])])
    assert all((piece.traffic, piece.size) in sent for piece in pieces if piece.size == piece.frame_size)


def test_a_hole_inside_a_body_costs_nothing() -> None:
    frame = _frame(3)
    dissector = Dissector(at_start=True)
    pieces = [
        *dissector.feed(0, frame[:200]),
        *dissector.skip(1, 300),
        *dissector.feed(2, frame[500:] + _frame(4)),
    ]
    assert [(piece.traffic, piece.size) for piece in pieces] == [("kv", len(frame)), ("control", len(_frame(4)))]


def test_a_hole_inside_a_message_costs_its_request_only() -> None:
    frame = _frame(2)
    dissector = Dissector(at_start=True)
    pieces = [*dissector.feed(0, frame[:40]), *dissector.skip(1, len(frame) - 40), *dissector.feed(2, _frame(1))]
    assert [(piece.traffic, request_of(piece.message)) for piece in pieces] == [
        ("control", None),
        ("token-ids", "cmpl-2"),
    ]


def test_messages_name_their_request() -> None:
    assert [request_of(message) for message, _ in MESSAGES] == [None, "cmpl-2", "cmpl-1", "cmpl-1", "cmpl-1"]
