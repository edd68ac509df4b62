"""Loss, duplication, corruption and reordering act on MTU segments and split only around those they touch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.model.impairment import BernoulliLoss, GilbertElliottLoss, Impairment, Jitter
from tests.testbed.links import packets
from tests.testbed.links.emulator.test_lane import MS, Wire, numbered

SUPER = packets.super_packet(bytes(range(256)) * 200, 1460)


def segments_of(wire: Wire) -> list[bytes]:
    return [segment for _, data in wire.written for segment in packets.finished(data)]


def test_lost_segments_are_missing_and_the_rest_stays_together() -> None:
    wire = Wire(Impairment(loss=BernoulliLoss(0.05)))
    sent = []
    for number in range(100):
        data = packets.super_packet(bytes(51_200), 1460, sequence=number * 51_200, ident=number * 36)
        sent += packets.finished(data)
        wire.arrive(data)
    wire.run_until(MS)
    received = segments_of(wire)
    counters = wire.lane.counters()
    assert counters["lost"] == len(sent) - len(received) == len(set(sent)) - len(set(received)) > 100
    assert received == [segment for segment in sent if segment in set(received)]
    assert counters["packets"] == len(received)
    assert counters["bytes"] == sum(map(len, received))
    assert len(wire.written) <= 100 + counters["lost"]


def test_lost_segments_take_their_time_at_the_bottleneck() -> None:
    """The bottleneck lies before the lossy wire: a flow's goodput is rate x (1 - loss)."""
    wire = Wire(Impairment(rate_bps=12_000_000, queue_bytes=10_000_000, loss=BernoulliLoss(0.3)))
    for number in range(1000):
        wire.arrive(numbered(number, 1500))
    wire.run_until(10_000 * MS)
    for at, data in wire.written:
        assert at == (int.from_bytes(data[30:34], "big") + 1) * MS


def test_an_outage_loses_what_arrives_and_delivers_what_is_in_flight() -> None:
    wire = Wire(Impairment(delay_ns=100 * MS))
    wire.arrive(numbered(0), at=0)
    wire.lane.configure(Impairment(delay_ns=100 * MS, loss=BernoulliLoss(1.0)), 1 << 30, wire.now)
    wire.arrive(numbered(1), at=MS)
    wire.arrive(SUPER, at=2 * MS)
    wire.lane.configure(Impairment(delay_ns=100 * MS), 1 << 30, wire.now)
    wire.arrive(numbered(2), at=3 * MS)
    wire.run_until(1000 * MS)
    assert [data for _, data in wire.written] == [numbered(0), numbered(2)]


def test_duplicates_follow_their_originals() -> None:
    wire = Wire(Impairment(duplication=1.0, delay_ns=MS))
    wire.arrive(SUPER)
    wire.run_until(10 * MS)
    once = packets.finished(SUPER)
    assert segments_of(wire) == [segment for segment in once for _ in range(2)]
    assert wire.lane.counters()["duplicated"] == len(once)


def test_a_corrupted_segment_differs_in_one_bit_from_the_finished_one() -> None:
    wire = Wire(Impairment(corruption=1.0))
    wire.arrive(SUPER)
    wire.arrive(udp_to_be_finished())
    wire.run_until(MS)
    originals = packets.finished(SUPER) + packets.finished(udp_to_be_finished())
    assert wire.lane.counters()["corrupted"] == len(originals)
    for original, (_, data) in zip(originals, wire.written, strict=True):
        assert data[:10] == bytes(10), "no checksum may be left to be finished: it would heal the damage"
        difference = int.from_bytes(original, "big") ^ int.from_bytes(data[10:], "big")
        assert difference.bit_count() == 1
        assert data[10] >> 4 == 4


def udp_to_be_finished() -> bytes:
    """A UDP packet whose checksum is left to the device."""
    datagram = b"\x1b\x58\x1b\x58\x00\x6c\x00\x00" + bytes(range(100))
    packet = bytearray(packets.ipv4(datagram, 17))
    partial = ~packets.checksum(packets.pseudo_header(packet[12:16], packet[16:20], 17, 108)) & 0xFFFF
    packet[26:28] = partial.to_bytes(2, "big")
    return packets.VNET.pack(1, 0, 0, 0, 20, 6) + bytes(packet)


def test_reordered_packets_skip_the_delay_and_the_others_keep_their_order() -> None:
    wire = Wire(Impairment(delay_ns=50 * MS, reordering=0.1))
    for number in range(1000):
        wire.arrive(numbered(number), at=number * MS)
    wire.run_until(5000 * MS)
    assert len(wire.written) == 1000
    numbers = {True: [], False: []}  # type: dict[bool, list[int]]
    for at, data in wire.written:
        number = int.from_bytes(data[30:34], "big")
        early = at == number * MS
        assert early or at == (number + 50) * MS
        numbers[early].append(number)
    assert len(numbers[True]) == wire.lane.counters()["reordered"] == pytest.approx(100, abs=26)
    assert numbers[True] == sorted(numbers[True])
    assert numbers[False] == sorted(numbers[False])


def test_a_packet_that_overtakes_leaves_the_bottleneck_in_time() -> None:
    wire = Wire(Impairment(rate_bps=12_000_000, queue_bytes=1_000_000, delay_ns=50 * MS, reordering=0.2))
    for number in range(100):
        wire.arrive(numbered(number, 1500))
    wire.run_until(1000 * MS)
    assert wire.lane.lateness.max_ns == 0
    assert {at - (int.from_bytes(data[30:34], "big") + 1) * MS for at, data in wire.written} == {0, 50 * MS}


def test_jitter_varies_the_delay_and_never_reorders_nor_sends_before_arrival() -> None:
    wire = Wire(Impairment(delay_ns=MS, jitter=Jitter(5 * MS)))
    for number in range(3000):
        wire.arrive(numbered(number), at=number * MS)
    wire.run_until(10_000 * MS)
    assert [data for _, data in wire.written] == [numbered(number) for number in range(3000)]
    delays = [at - number * MS for number, at in enumerate(wire.times)]
    assert min(delays) >= 0
    assert max(delays) > 8 * MS


def test_the_same_seed_and_packets_meet_the_same_fate() -> None:
    impairment = Impairment(
        loss=GilbertElliottLoss(0.02, 0.2, 0.8, 0.01), duplication=0.02, corruption=0.02, reordering=0.02, delay_ns=MS
    )
    outcomes = []
    for seed in ("1/wan0/forward", "1/wan0/forward", "1/wan0/backward"):
        wire = Wire(impairment, seed=seed)
        for number in range(500):
            wire.arrive(numbered(number), at=number * MS // 10)
        wire.run_until(1000 * MS)
        outcomes.append(wire.written)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] != outcomes[2]


def test_a_change_of_delay_leaves_the_losses_where_they_were() -> None:
    fates = []
    for change in (False, True):
        wire = Wire(Impairment(loss=BernoulliLoss(0.1), delay_ns=MS))
        for number in range(1000):
            if change and number == 500:
                wire.lane.configure(Impairment(loss=BernoulliLoss(0.1), delay_ns=2 * MS), 1 << 30, wire.now)
            wire.arrive(numbered(number), at=number * MS)
        wire.run_until(2000 * MS)
        fates.append([data for _, data in wire.written])
    assert fates[0] == fates[1]


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(1, 44), min_size=1, max_size=20),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
    st.sampled_from([None, 10_000_000, 1_000_000_000]),
)
def test_every_segment_is_delivered_lost_or_doubled_and_untouched_bytes_are_exact(
    seed: int, sizes: list[int], loss: float, duplication: float, rate: int | None
) -> None:
    impairment = Impairment(
        rate_bps=rate, queue_bytes=1 << 30 if rate else None, loss=BernoulliLoss(loss), duplication=duplication
    )
    wire = Wire(impairment, seed=str(seed))
    sent = []
    for number, segments in enumerate(sizes):
        data = packets.super_packet(bytes(segments * 1000), 1000, sequence=number * 100_000, ident=number * 50)
        sent += packets.finished(data)
        wire.arrive(data)
    wire.run_until(100_000 * MS)
    received, counters = segments_of(wire), wire.lane.counters()
    assert len(received) == len(sent) - counters["lost"] + counters["duplicated"] == counters["packets"]
    assert set(received) <= set(sent)
    assert received == sorted(received, key=sent.index)
