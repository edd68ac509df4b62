"""The bottleneck's logical clock, queue and chunks. No root, no waiting: time is a number here."""

from hypothesis import given
from hypothesis import strategies as st

from testbed.links.emulator.bottleneck import CHUNK_NS, FOREVER, Bottleneck
from testbed.links.emulator.packet import Packet
from tests.testbed.links import packets

MS = 1_000_000


class Recorder:
    """Collects what left the bottleneck: (packet, first, last, at)."""

    def __init__(self, rate_bps: int | None, queue_bytes: int | None) -> None:
        self.left: list[tuple[Packet, int, int, int]] = []
        self.bottleneck = Bottleneck(lambda *what: self.left.append(what))
        self.bottleneck.configure(rate_bps, queue_bytes, None, 0)

    def offer(self, packet: Packet, now: int) -> None:
        self.bottleneck.advance(now)
        self.bottleneck.offer(packet, now)

    def drain(self) -> None:
        self.bottleneck.advance(FOREVER - 1)

    @property
    def times(self) -> list[int]:
        return [at for *_, at in self.left]

    @property
    def segments(self) -> int:
        return sum(last - first for _, first, last, _ in self.left)


def single(ip_bytes: int = 1500) -> Packet:
    return Packet(packets.plain(packets.ipv4(bytes(ip_bytes - 20), 17)))


def super_packet(segments: int) -> Packet:
    """`segments` full MTU packets of 1500 bytes."""
    return Packet(packets.super_packet(bytes(1460 * segments), 1460))


def test_packets_leave_one_serialization_time_apart_however_late_one_looks() -> None:
    recorder = Recorder(10_000_000, 100_000)
    for _ in range(10):
        recorder.offer(single(), 0)
    recorder.drain()
    assert recorder.times == [1_200_000 * (n + 1) for n in range(10)]


def test_an_idle_link_serializes_from_the_arrival() -> None:
    recorder = Recorder(12_000_000, 100_000)
    recorder.offer(single(), 5 * MS)
    recorder.offer(single(), 50 * MS)
    recorder.drain()
    assert recorder.times == [6 * MS, 51 * MS]


def test_rounding_does_not_add_up() -> None:
    rate = 7_000_000_001
    recorder = Recorder(rate, 1 << 30)
    for _ in range(10_000):
        recorder.offer(single(), 0)
    recorder.drain()
    assert recorder.times[-1] == 10_000 * 1500 * 8 * 10**9 // rate


def test_the_queue_holds_its_bytes_and_drops_the_tail() -> None:
    recorder = Recorder(1_000_000, 15_000)
    for _ in range(30):
        recorder.offer(single(), 0)
    assert recorder.bottleneck.dropped_tail == 20
    assert recorder.bottleneck.queued_bytes == recorder.bottleneck.queued_bytes_max == 15_000
    recorder.drain()
    assert recorder.segments == 10
    assert recorder.bottleneck.queued_bytes == 0


def test_a_full_queue_takes_the_segments_of_a_super_packet_that_fit() -> None:
    recorder = Recorder(1_000_000, 15_000)
    recorder.offer(super_packet(44), 0)
    assert recorder.bottleneck.dropped_tail == 34
    recorder.drain()
    assert recorder.segments == 10


def test_room_grows_as_the_head_is_serialized() -> None:
    recorder = Recorder(12_000_000, 3_000)
    recorder.offer(single(), 0)
    recorder.offer(single(), 0)
    recorder.offer(single(750), MS // 4)
    assert recorder.bottleneck.dropped_tail == 1
    recorder.offer(single(750), MS // 2)
    assert recorder.bottleneck.dropped_tail == 1


def test_an_idle_link_carries_a_packet_larger_than_its_queue() -> None:
    recorder = Recorder(1_000_000, 100)
    recorder.offer(single(), 0)
    recorder.offer(single(), 0)
    recorder.drain()
    assert recorder.segments == 1


@given(rate=st.integers(100_000, 40_000_000_000), segments=st.integers(1, 44))
def test_no_chunk_is_longer_than_half_a_millisecond_or_one_segment(rate: int, segments: int) -> None:
    recorder = Recorder(rate, 1 << 30)
    packet = super_packet(segments)
    recorder.offer(packet, 0)
    recorder.drain()
    assert recorder.segments == segments
    assert recorder.times[-1] == packet.ip_bytes * 8 * 10**9 // rate
    for _, first, last, _ in recorder.left:
        assert last - first == 1 or packet.bytes_of(first, last) * 8 * 10**9 // rate <= CHUNK_NS


def test_a_new_rate_applies_to_the_rest_of_what_is_queued_and_loses_nothing() -> None:
    recorder = Recorder(1_200_000, 100_000)  # 10 ms a packet
    for _ in range(3):
        recorder.offer(single(), 0)
    recorder.bottleneck.configure(12_000_000, 100_000, None, 15 * MS)  # half of the second is left: 0.5 ms
    recorder.drain()
    assert recorder.times == [10 * MS, 15_500_000, 16_500_000]


def test_without_a_limit_any_more_the_queue_leaves_at_once_in_order() -> None:
    recorder = Recorder(1_200_000, 100_000)
    offered = [single(), super_packet(5), single(100)]
    for packet in offered:
        recorder.offer(packet, 0)
    recorder.bottleneck.configure(None, None, None, MS)
    assert [packet for packet, *_ in recorder.left] == offered
    assert recorder.segments == 7
    assert set(recorder.times) == {MS}
    assert recorder.bottleneck.queued_bytes == 0


def test_a_smaller_queue_keeps_what_is_already_there() -> None:
    recorder = Recorder(1_200_000, 100_000)
    for _ in range(10):
        recorder.offer(single(), 0)
    recorder.bottleneck.configure(1_200_000, 3_000, None, MS)
    recorder.offer(single(), MS)
    recorder.drain()
    assert (recorder.segments, recorder.bottleneck.dropped_tail) == (10, 1)


@given(
    st.lists(st.tuples(st.integers(0, 3 * MS), st.integers(1, 44)), min_size=1, max_size=40),
    st.integers(1_000_000, 5_000_000_000),
    st.integers(1_000, 300_000),
)
def test_segments_are_conserved_and_leave_in_order(arrivals: list[tuple[int, int]], rate: int, queue: int) -> None:
    recorder = Recorder(rate, queue)
    now = offered = 0
    for gap, segments in arrivals:
        now += gap
        offered += segments
        recorder.offer(super_packet(segments) if segments > 1 else single(), now)
    recorder.drain()
    assert recorder.segments + recorder.bottleneck.dropped_tail == offered
    assert recorder.times == sorted(recorder.times)
    assert recorder.bottleneck.queued_bytes == 0
    assert recorder.bottleneck.queued_bytes_max <= max(queue, 1500)
