"""CoDel against RFC 8289: patient with bursts, firm with a standing queue."""

from testbed.links.emulator.codel import CoDelState
from testbed.model.impairment import CoDel, Impairment
from tests.testbed.links.emulator.test_lane import MS, Wire, numbered

TARGET, INTERVAL = 5 * MS, 100 * MS


def drops_at(state: CoDelState, waited_ns: int, times: range) -> list[int]:
    return [now for now in times if state.drops(waited_ns, 1500, 100_000, now)]


def test_nothing_is_dropped_below_the_target() -> None:
    assert drops_at(CoDelState(CoDel()), TARGET - 1, range(0, 2000 * MS, MS)) == []


def test_a_burst_shorter_than_the_interval_is_spared() -> None:
    state = CoDelState(CoDel())
    assert drops_at(state, 50 * MS, range(0, 99 * MS, MS)) == []
    assert not state.drops(0, 1500, 100_000, 99 * MS)
    assert drops_at(state, 50 * MS, range(100 * MS, 199 * MS, MS)) == []


def test_a_standing_queue_is_dropped_from_at_the_control_laws_times() -> None:
    dropped = drops_at(CoDelState(CoDel()), 20 * MS, range(0, 400 * MS, MS))
    # First after one interval, then interval / sqrt(1), / sqrt(2), ... later.
    assert dropped[0] == 100 * MS
    expected = [100.0, 200.0, 270.7, 328.4, 378.4]
    assert len(dropped) == len(expected)
    assert all(0 <= now / MS - when < 1 for now, when in zip(dropped, expected, strict=True))


def test_the_last_packet_is_never_dropped() -> None:
    state = CoDelState(CoDel())
    assert not any(state.drops(500 * MS, 1500, 0, now) for now in range(0, 1000 * MS, MS))


def test_a_lane_with_codel_keeps_the_wait_near_the_target_where_tail_drop_fills_the_queue() -> None:
    waits = {}
    for codel in (None, CoDel()):
        wire = Wire(Impairment(rate_bps=12_000_000, queue_bytes=150_000, codel=codel))  # 1 ms a packet
        for number in range(8000):
            wire.arrive(numbered(number, 1500), at=number * 950_000)
        wire.run_until(10_000 * MS)
        counters = wire.lane.counters()
        assert counters["packets"] + counters["dropped_queue"] == 8000
        assert (counters["dropped_codel"] > 0) == (codel is not None)
        late = [(at, int.from_bytes(data[30:34], "big")) for at, data in wire.written[-500:]]
        waits[codel] = max(at - number * 950_000 for at, number in late)
    assert waits[None] > 95 * MS
    assert waits[CoDel()] < 40 * MS
