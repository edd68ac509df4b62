"""Unique bytes of a TCP direction, whatever the network did to its segments."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from testbed.capture.tcp import GRACE_NS, HalfStream

NS = 1_000_000


def _payload(size: int) -> bytes:
    return bytes((7 * number + number // 251) & 0xFF for number in range(size))


@given(
    first=st.integers(0, 2**32 - 1),
    size=st.integers(1, 400),
    extra=st.lists(st.tuples(st.integers(0, 399), st.integers(1, 80)), max_size=30),
    order=st.randoms(use_true_random=False),
    cuts=st.lists(st.integers(1, 399), max_size=12),
    kept=st.sampled_from([None, 0, 5]),
)
def test_every_byte_counts_once_however_segments_overlap_and_swap(first, size, extra, order, cuts, kept) -> None:
    data = _payload(size)
    edges = sorted({0, size, *(cut for cut in cuts if cut < size)})
    segments = list(itertools.pairwise(edges))
    segments += [(begin, min(size, begin + length)) for begin, length in extra if begin < size]
    rest = segments[1:]
    order.shuffle(rest)  # the first one tells where the stream begins
    half = HalfStream()
    runs = []
    for number, (begin, end) in enumerate([segments[0], *rest]):
        captured = data[begin:end] if kept is None else data[begin : min(end, begin + kept)]
        runs += half.add(number, (first + begin) % 2**32, end - begin, captured)
    runs += half.end()
    assert sum(length for _, length, _ in runs) == half.unique_bytes == size
    assert half.retransmitted_bytes == sum(end - begin for begin, end in segments) - size
    assert half.missed_bytes == 0
    if kept is None:
        assert b"".join(captured for _, _, captured in runs) == data
    elif kept == 0:
        assert not any(captured for _, _, captured in runs)


def test_a_retransmission_of_bytes_from_before_the_capture_is_not_new() -> None:
    half = HalfStream()
    assert list(half.add(0, 1000, 100, b"")) == [(0, 100, b"")]
    assert list(half.add(1, 900, 100, b"")) == []
    assert (half.unique_bytes, half.retransmitted_bytes) == (100, 100)


def test_a_lost_segment_holds_back_what_follows_until_it_crosses_again() -> None:
    half = HalfStream()
    list(half.add(0, 0, 10, b"0123456789"))
    assert list(half.add(1, 20, 10, b"klmnopqrst")) == []
    # the receiver repeats its acknowledgement of what it has, for as long as it takes
    assert list(half.acknowledge(10 * GRACE_NS, 10)) == []
    assert list(half.add(11 * GRACE_NS, 10, 10, b"abcdefghij")) == [
        (11 * GRACE_NS, 10, b"abcdefghij"),
        (1, 10, b"klmnopqrst"),
    ]
    assert half.missed_bytes == 0


def test_bytes_that_the_receiver_acknowledged_and_the_capture_lacks_are_missed() -> None:
    half = HalfStream()
    list(half.add(0, 0, 10, b"0123456789"))
    list(half.add(1, 20, 10, b"klmnopqrst"))
    assert list(half.acknowledge(2, 30)) == []  # the segment may still come: files need not be sorted
    assert list(half.acknowledge(3 + GRACE_NS, 30)) == [(1, 10, b""), (1, 10, b"klmnopqrst")]
    assert (half.missed_bytes, half.unique_bytes) == (10, 20)


def test_positions_survive_the_wrap_of_sequence_numbers() -> None:
    half = HalfStream()
    half.open(2**32 - 6)
    assert half.at_start
    assert list(half.add(0, 2**32 - 5, 10, b"abcdefghij")) == [(0, 10, b"abcdefghij")]
    assert list(half.add(1, 5, 3, b"klm")) == [(1, 3, b"klm")]
