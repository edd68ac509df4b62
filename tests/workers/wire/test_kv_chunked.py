"""KV that leaves while the rest is computed: the same bytes, refusals and repairs, over real sockets."""

import asyncio

import pytest

from tests.workers.serving import eventually, run
from tests.workers.wire.pair import BLOCK_SIZE, BYTES_PER_TOKEN, End, Memory, QuickPath, Wan, outgoing, spec
from workers.wire.kv_send import OutgoingKv, TransferAborted, TransferRefused
from workers.wire.kv_source import First, KvSource
from workers.wire.stream import ConnectionLost


def following(memory: Memory, source: KvSource, chunk_tokens: int = 1, first_block: int = 0) -> OutgoingKv:
    blocks = list(range(-(-source.tokens // BLOCK_SIZE)))
    return OutgoingKv(spec("r", source.tokens), memory, blocks, source, first_block, chunk_tokens)


def received(end: End) -> int:
    """Verified blocks of the request's transfer."""
    return end.sinks["r"].verified_blocks if "r" in end.sinks else 0


def test_finished_blocks_leave_before_the_rest_is_computed_and_every_byte_arrives() -> None:
    async def test() -> None:
        async with Wan() as wan:
            source, memory = KvSource(200), Memory(32, fill=3)
            sending = asyncio.create_task(following(memory, source).deliver(wan.pool))
            for ready, blocks in ((15, 0), (16, 1), (40, 2), (199, 12)):
                source.advance(ready)
                if blocks:
                    await eventually(lambda blocks=blocks: received(wan.md0) == blocks, 5, f"{blocks} blocks are there")
                else:
                    await asyncio.sleep(0.02)
                    assert wan.md0.sinks == {}, "no full block, nothing to send"
            assert not sending.done()
            source.finish(First(9, "stop"))
            delivered = await sending
            assert await wan.md0.sinks["r"].result == ("complete", 9)
            assert wan.md0.memory.data[: 200 * BYTES_PER_TOKEN] == memory.data[: 200 * BYTES_PER_TOKEN]
            assert delivered.chunks == 3
            assert 0 < delivered.waited_ns < delivered.received_ns - delivered.start_ns

    run(test())


def test_a_chunk_is_as_large_as_was_asked_for() -> None:
    async def test() -> None:
        async with Wan() as wan:
            source = KvSource(200)
            sending = asyncio.create_task(following(Memory(32, fill=3), source, chunk_tokens=64).deliver(wan.pool))
            source.advance(63)
            await asyncio.sleep(0.02)
            assert wan.md0.sinks == {}
            source.advance(70)
            await eventually(lambda: received(wan.md0) == 4, 5, "one chunk of 4 blocks")
            source.advance(127)
            await asyncio.sleep(0.02)
            assert received(wan.md0) == 4, "3 finished blocks are no chunk"
            source.finish(First(1))
            assert (await sending).chunks == 1

    run(test())


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32])
def test_what_receiver_and_prefill_have_already_needs_no_waiting(tokens: int) -> None:
    async def test() -> None:
        async with Wan() as wan:
            full = tokens // BLOCK_SIZE
            source = KvSource(tokens, ready=full * BLOCK_SIZE)
            sending = asyncio.create_task(following(Memory(8, fill=1), source, first_block=full).deliver(wan.pool))
            await asyncio.sleep(0.02)
            assert not sending.done(), "without the first token it cannot end"
            source.finish(First(4))
            delivered = await sending
            assert (delivered.kv_bytes, delivered.chunks) == ((tokens - full * BLOCK_SIZE) * BYTES_PER_TOKEN, 0)
            assert await wan.md0.sinks["r"].result == ("complete", 4)

    run(test())


def test_a_sender_that_waits_longer_than_the_stall_deadline_says_that_it_is_alive() -> None:
    async def test() -> None:
        async with Wan(connections=1) as wan:
            source = KvSource(100)
            sending = asyncio.create_task(following(Memory(8, fill=1), source).deliver(wan.pool))
            source.advance(50)
            await eventually(lambda: received(wan.md0) == 3, 5, "the first blocks are there")
            await asyncio.sleep(2.5 * QuickPath().stall_s)
            assert not sending.done(), "neither end gave the transfer up"
            source.finish(First(1))
            await sending
            assert wan.p0.local.counters.bytes("md0", "sent", "padding") > 0
            assert wan.p0.local.counters.bytes("md0", "sent", "padding") == wan.md0.local.counters.bytes(
                "p0", "received", "padding"
            )

    run(test())


@pytest.mark.parametrize("ready", [0, 50])
def test_giving_up_while_prefill_computes_frees_the_connection(ready: int) -> None:
    async def test() -> None:
        async with Wan(connections=1) as wan:
            source = KvSource(100)
            kv = following(Memory(8, fill=1), source)
            sending = asyncio.create_task(kv.deliver(wan.pool))
            source.advance(ready)
            if ready:
                await eventually(lambda: received(wan.md0) == 3, 5, "the first blocks are there")
            else:
                await asyncio.sleep(0.01)
            kv.abort("client gone")
            with pytest.raises(TransferAborted):
                await sending
            if ready:
                assert await wan.md0.sinks["r"].result == ("transfer_aborted", "client gone")
            await outgoing(Memory(8, fill=1), "next", 100).deliver(wan.pool)

    run(test())


def test_a_refusal_ends_a_transfer_that_waits_for_prefill() -> None:
    async def test() -> None:
        async with Wan(connections=1) as wan:
            wan.md0.refuse = "md0: 7 KV blocks needed, 3 free"
            source = KvSource(100, ready=48)
            with pytest.raises(TransferRefused, match="7 KV blocks needed"):
                await following(Memory(8, fill=1), source).deliver(wan.pool)
            wan.md0.refuse = None
            await outgoing(Memory(8, fill=1), "next", 100).deliver(wan.pool)

    run(test())


def test_a_connection_that_breaks_while_prefill_computes_is_noticed_at_once() -> None:
    async def test() -> None:
        async with Wan(connections=1) as wan:
            source = KvSource(100, ready=48)
            sending = asyncio.create_task(following(Memory(8, fill=1), source).deliver(wan.pool))
            await eventually(lambda: received(wan.md0) == 3, 5, "the first blocks are there")
            wan.proxy.cut()
            with pytest.raises(ConnectionLost):
                await sending
            assert (await wan.md0.sinks["r"].result)[0] == "connection_lost"
            again = asyncio.create_task(following(Memory(8, fill=1), source, first_block=3).deliver(wan.pool))
            source.finish(First(2))
            assert (await again).kv_bytes == 52 * BYTES_PER_TOKEN

    run(test())
