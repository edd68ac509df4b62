"""Padding that opens the windows of new connections: bounded, counted as what it is, out of everybody's way."""

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.serving import eventually, run
from tests.workers.wire.pair import End, Memory, QuickPath, Wan, outgoing
from workers.wire.codec import encode
from workers.wire.deadlines import Path
from workers.wire.dissect import Dissector, request_of
from workers.wire.frames import Kind, pack
from workers.wire.kv_messages import KvAbort, Padding
from workers.wire.warming import MOST_BYTES, warm_up_for

MBIT = 10**6


@dataclass(frozen=True, slots=True)
class QuickWanPath(QuickPath):
    """As far as warming knows: a WAN of 2 MB."""

    rtt_ns: int = 40_000_000
    rate_bps: int | None = 400 * MBIT


def padding(end: End, direction: str) -> int:
    return sum(size for _, way, kind, size, _ in end.local.counters.rows() if (way, kind) == (direction, "padding"))


def test_a_window_is_worth_most_of_the_bandwidth_delay_product() -> None:
    plan = warm_up_for(Path(40_000_000, 400 * MBIT), 8)
    assert plan is not None
    assert (plan.share_bytes, plan.whole_bytes) == (175_000, 1_400_000)


def test_a_connection_with_a_bandwidth_of_its_own_needs_no_more_than_that() -> None:
    plan = warm_up_for(Path(40_000_000, 400 * MBIT, connection_bps=10 * MBIT), 8)
    assert plan is not None
    assert (plan.share_bytes, plan.whole_bytes) == (100_000, 100_000)


def test_within_a_datacenter_there_is_nothing_to_warm() -> None:
    assert warm_up_for(Path(), 8) is None
    assert warm_up_for(Path(100_000, 10_000 * MBIT), 8) is None


@given(st.integers(10**6, 10**10), st.none() | st.integers(1000, 10**11), st.integers(1, 256))
def test_padding_is_less_than_two_products_in_all_and_less_than_one_at_once(
    rtt_ns: int, rate_bps: int | None, connections: int
) -> None:
    plan = warm_up_for(Path(rtt_ns, rate_bps), connections)
    assert plan is not None
    assert plan.share_bytes * connections <= plan.whole_bytes <= MOST_BYTES
    if rate_bps is not None:
        assert plan.whole_bytes <= rate_bps * rtt_ns / 8e9
    assert plan.deadline_s < 1 + 25 * rtt_ns / 1e9


@pytest.mark.parametrize("connections", [1, 4])
def test_new_connections_are_padded_once_and_both_ends_count_it(connections: int) -> None:
    async def test() -> None:
        async with Wan(connections=connections, warm_kv=True, path=QuickWanPath()) as wan:
            share = 1_400_000 // connections
            least = share * connections + (1_400_000 - share)
            await eventually(lambda: padding(wan.md0, "received") >= least, 10, "all is there")
            await asyncio.sleep(0.1)
            assert padding(wan.p0, "sent") == padding(wan.md0, "received") < least * 1.01
            assert wan.p0.local.counters.bytes("md0", "sent", "kv") == 0
            assert len(wan.pool._idle) == connections
            assert wan.pool._idle[-1] is wan.pool._widest, "the next transfer takes the widest"
            await outgoing(Memory(32, fill=1), "r", 500).deliver(wan.pool)
            assert wan.md0.memory.data[:500_000] == Memory(32, fill=1).data[:500_000]

    run(test())


def test_a_connection_that_is_dialled_again_is_padded_again() -> None:
    async def test() -> None:
        async with Wan(connections=1, warm_kv=True, path=QuickWanPath()) as wan:
            await eventually(lambda: padding(wan.md0, "received") >= 1_400_000, 10, "the first is padded")
            wan.proxy.cut()
            await eventually(lambda: padding(wan.md0, "received") >= 2_800_000, 10, "its successor as well")

    run(test())


def test_a_transfer_does_not_wait_for_padding() -> None:
    async def test() -> None:
        async with Wan(connections=1, warm_kv=True, path=QuickWanPath(), rate_bytes_per_s=500e3) as wan:
            await eventually(lambda: padding(wan.p0, "sent") > 100_000, 10, "padding is under way")
            await outgoing(Memory(32, fill=1), "r", 100).deliver(wan.pool)
            sent = padding(wan.p0, "sent")
            assert sent < 1_400_000, "the rest was given up"
            await asyncio.sleep(0.2)
            assert padding(wan.p0, "sent") == sent
            assert (await wan.md0.sinks["r"].result)[0] == "complete"

    run(test())


def test_a_capture_tells_padding_from_kv() -> None:
    frames = pack(Kind.PADDING, encode(Padding()), 5000) + bytes(5000)
    frames += pack(Kind.CONTROL, encode(KvAbort(transfer="r.1", reason="x")))
    dissector = Dissector(at_start=True)
    pieces = [piece for data in (frames[:300], frames[300:]) for piece in dissector.feed(1, data)]
    assert [(piece.traffic, piece.body_bytes) for piece in pieces] == [("padding", 5000), ("control", 0)]
    assert sum(piece.size for piece in pieces) == len(frames)
    assert request_of(pieces[0].message) is None


def test_cold_is_what_was_asked_for() -> None:
    async def test() -> None:
        async with Wan(warm_kv=False, path=QuickWanPath()) as wan:
            await outgoing(Memory(32, fill=1), "r", 500).deliver(wan.pool)
            assert padding(wan.p0, "sent") == 0

    run(test())
