"""One direction as a whole: delay, order, live change, bounded memory, counters. Time is a number here."""

from testbed.links.emulator.bottleneck import FOREVER
from testbed.links.emulator.lane import Lane
from testbed.links.emulator.packet import Frame
from testbed.model.impairment import Impairment
from tests.testbed.links import packets

MS = 1_000_000


class Wire:
    """A lane with a clock that stands still between calls, and the frames it wrote: (time, bytes)."""

    def __init__(self, impairment: Impairment, limit_bytes: int = 1 << 30, seed: str = "") -> None:
        self.now = 0
        self.written: list[tuple[int, bytes]] = []
        self.accepts = True
        self.lane = Lane(impairment, limit_bytes, self._write, 0, seed)

    def _write(self, frame: Frame) -> bool:
        self.written.append((self.now, frame if isinstance(frame, bytes) else b"".join(frame)))
        return self.accepts

    def arrive(self, data: bytes, at: int | None = None) -> None:
        if at is not None:
            self.run_until(at)
        self.lane.arrive(data, self.now)

    def run_until(self, end: int) -> None:
        """Emit at each deadline that the lane names, as the loop does."""
        while (due := self.lane.emit(self.now, lambda: self.now)) <= end:
            self.now = due
        self.now = end

    @property
    def times(self) -> list[int]:
        return [at for at, _ in self.written]


def numbered(number: int, ip_bytes: int = 100) -> bytes:
    return packets.plain(packets.ipv4(number.to_bytes(4, "big") + bytes(ip_bytes - 24), 17))


def test_a_packet_leaves_after_serialization_and_delay() -> None:
    wire = Wire(Impairment(rate_bps=12_000_000, queue_bytes=100_000, delay_ns=20 * MS))
    wire.arrive(numbered(0, 1500), at=3 * MS)
    wire.run_until(1000 * MS)
    assert wire.times == [24 * MS]
    assert wire.lane.lateness.max_ns == 0


def test_the_lane_names_the_next_departure_and_sleeps_when_empty() -> None:
    wire = Wire(Impairment(rate_bps=12_000_000, queue_bytes=100_000))
    assert wire.lane.emit(0, lambda: 0) >= FOREVER
    wire.arrive(numbered(0, 1500))
    assert wire.lane.emit(0, lambda: 0) == MS


def test_a_shorter_delay_does_not_let_later_packets_overtake() -> None:
    wire = Wire(Impairment(delay_ns=100 * MS))
    for number in range(10):
        wire.arrive(numbered(number), at=number * MS)
    wire.lane.configure(Impairment(delay_ns=5 * MS), 1 << 30, wire.now)
    for number in range(10, 200):
        wire.arrive(numbered(number), at=number * MS)
    wire.run_until(1000 * MS)
    assert [data for _, data in wire.written] == [numbered(number) for number in range(200)]
    assert wire.times[:10] == [(100 + number) * MS for number in range(10)]
    assert wire.times[150] == 155 * MS


def test_a_longer_delay_holds_for_new_packets_only() -> None:
    wire = Wire(Impairment(delay_ns=5 * MS))
    wire.arrive(numbered(0))
    wire.lane.configure(Impairment(delay_ns=50 * MS), 1 << 30, 0)
    wire.arrive(numbered(1), at=1 * MS)
    wire.run_until(1000 * MS)
    assert wire.times == [5 * MS, 51 * MS]


def test_memory_is_bounded_and_what_does_not_fit_is_counted_as_unasked() -> None:
    wire = Wire(Impairment(delay_ns=1000 * MS), limit_bytes=100_000)
    for number in range(1000):
        wire.arrive(numbered(number, 1500))
    wire.run_until(2000 * MS)
    assert 50 <= len(wire.written) <= 70
    counters = wire.lane.counters()
    assert counters["dropped_line"] == counters["dropped_unasked"] == 1000 - len(wire.written)
    wire.arrive(numbered(0, 1500))
    wire.run_until(4000 * MS)
    assert wire.lane.counters()["packets"] == len(wire.written)


def test_a_lower_limit_does_not_drop_what_comes_behind_a_full_line() -> None:
    """A rate that falls while a long line is full: 400 Mbit/s x 1 s is 50 MB, far more than 1 Mbit/s x 1 s."""
    wire = Wire(Impairment(delay_ns=1000 * MS), limit_bytes=200_000)
    for number in range(100):
        wire.arrive(numbered(number, 1500), at=number * MS)
    slower = Impairment(rate_bps=1_000_000, queue_bytes=100_000, delay_ns=1000 * MS)
    wire.lane.configure(slower, 20_000, wire.now)
    for number in range(10):
        wire.arrive(numbered(100 + number, 1500), at=(100 + 20 * number) * MS)
    wire.run_until(10_000 * MS)
    assert len(wire.written) == 110
    assert wire.lane.counters()["dropped_unasked"] == 0


def test_noise_and_nonsense_are_counted_and_never_written() -> None:
    wire = Wire(Impairment())
    wire.arrive(packets.plain(b"\x60" + bytes(59)))
    wire.arrive(b"")
    wire.arrive(packets.plain(b"\x45"))
    wire.run_until(MS)
    assert wire.written == []
    assert wire.lane.counters()["ignored_not_ipv4"] == 1
    assert wire.lane.counters()["dropped_malformed"] == 2


def test_a_frame_that_the_device_refuses_is_an_unasked_drop() -> None:
    wire = Wire(Impairment())
    wire.accepts = False
    wire.arrive(numbered(0))
    wire.run_until(MS)
    assert wire.lane.counters()["dropped_write"] == 1
    assert wire.lane.counters()["dropped_unasked"] == 1


def test_counters_count_segments_and_ip_bytes() -> None:
    wire = Wire(Impairment(rate_bps=100_000_000, queue_bytes=1_000_000))
    wire.arrive(packets.super_packet(bytes(14_600), 1460))
    wire.arrive(numbered(1, 100))
    wire.run_until(1000 * MS)
    counters = wire.lane.counters()
    assert (counters["packets"], counters["bytes"]) == (11, 15_100)
    sent = [segment for _, data in wire.written for segment in packets.finished(data)]
    assert sent == packets.finished(packets.super_packet(bytes(14_600), 1460)) + packets.finished(numbered(1, 100))


def test_lateness_is_actual_minus_logical_departure() -> None:
    wire = Wire(Impairment(delay_ns=10 * MS))
    wire.arrive(numbered(0))
    wire.lane.emit(13 * MS, lambda: 13 * MS)
    assert wire.lane.lateness.max_ns == 3 * MS


def test_lateness_of_one_packet_does_not_delay_the_next() -> None:
    wire = Wire(Impairment(rate_bps=12_000_000, queue_bytes=100_000, delay_ns=10 * MS))
    wire.arrive(numbered(0, 1500))
    wire.arrive(numbered(1, 1500))
    wire.now = 11 * MS + MS // 2
    assert wire.lane.emit(wire.now, lambda: wire.now) == 12 * MS
