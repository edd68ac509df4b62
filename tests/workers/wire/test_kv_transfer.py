"""KV from memory to memory over real sockets: exact bytes, whatever the network does in between."""

import asyncio
import re
import socket
import time

import pytest

from tests.workers.serving import eventually, run
from tests.workers.wire.pair import BLOCK_SIZE, BYTES_PER_TOKEN, End, Memory, Wan, outgoing
from workers.wire.kv_pool import PeerUnreachable
from workers.wire.kv_send import TransferAborted, TransferRefused, block_lengths, new_transfer_id
from workers.wire.stream import ConnectionLost

BLOCK_BYTES = BLOCK_SIZE * BYTES_PER_TOKEN


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 500])
def test_a_transfer_delivers_every_byte_of_the_prompt_and_no_other(tokens: int) -> None:
    async def test() -> None:
        async with Wan() as wan:
            source = Memory(32, fill=3)
            wan.md0.memory.data[:] = b"\xee" * len(wan.md0.memory.data)
            delivered = await outgoing(source, "r", tokens, first_token=77).deliver(wan.pool)
            assert await wan.md0.sinks["r"].result == ("complete", 77)
            size = tokens * BYTES_PER_TOKEN
            assert wan.md0.memory.data[:size] == source.data[:size]
            assert set(wan.md0.memory.data[size:]) == {0xEE}, "a partial block sends its filled tokens only"
            assert delivered.kv_bytes == size
            assert delivered.queue_ns == 0
            assert delivered.start_ns < delivered.received_ns < time.monotonic_ns()

    run(test())


def test_block_lengths_are_full_but_for_the_last() -> None:
    assert block_lengths(1, 16) == [1]
    assert block_lengths(16, 16) == [16]
    assert block_lengths(17, 16) == [16, 1]
    assert block_lengths(0, 16) == []


def test_bytes_are_counted_in_their_class_on_both_ends() -> None:
    async def test() -> None:
        async with Wan() as wan:
            await outgoing(Memory(32, fill=1), "r", 500).deliver(wan.pool)
            sent = wan.p0.local.counters.bytes("md0", "sent", "kv")
            assert sent == wan.md0.local.counters.bytes("p0", "received", "kv")
            assert 500 * BYTES_PER_TOKEN < sent < 500 * BYTES_PER_TOKEN * 1.005
            assert wan.p0.local.counters.bytes("md0", "sent", "token-ids") == 0
            counted = sum(size for _, way, _, size, _ in wan.p0.local.counters.rows() if way == "sent")
            assert counted == wan.proxy.forwarded, "every byte on the wire is counted, headers and handshakes too"

    run(test())


def test_a_spoilt_block_is_refused_by_its_checksum_and_the_connection_stays_good() -> None:
    async def test() -> None:
        async with Wan(connections=1) as wan:
            wan.proxy.spoil_at = 100_000
            with pytest.raises(TransferRefused, match="does not match its checksum") as refused:
                await outgoing(Memory(32, fill=1), "spoilt", 300).deliver(wan.pool)
            assert refused.value.name == "kv_corrupt"
            assert (await wan.md0.sinks["spoilt"].result)[0] == "kv_corrupt"
            wan.proxy.spoil_at = None
            same = wan.pool._idle[0]
            await outgoing(Memory(32, fill=1), "good", 300).deliver(wan.pool)
            assert wan.pool._idle[0] is same
            assert (await wan.md0.sinks["good"].result)[0] == "complete"

    run(test())


def test_a_refusal_stops_the_sender_and_frees_the_connection() -> None:
    async def test() -> None:
        async with Wan(connections=1) as wan:
            wan.md0.refuse = "md0: 32 KV blocks needed, 3 free"
            with pytest.raises(TransferRefused, match="32 KV blocks needed") as refused:
                await outgoing(Memory(64, fill=1), "r", 1000).deliver(wan.pool)
            assert refused.value.name == "out_of_kv_blocks"
            wan.md0.refuse = None
            await outgoing(Memory(64, fill=1), "r", 1000).deliver(wan.pool)

    run(test())


def test_aborting_gives_the_blocks_back_at_once_and_keeps_the_connection() -> None:
    async def test() -> None:
        async with Wan(connections=1, blocks=4000) as wan:
            wan.proxy.pause()
            source = Memory(4000, fill=None)
            kv = outgoing(source, "r", 60_000)  # 60 MB: more than all socket buffers on the way
            sending = asyncio.create_task(kv.deliver(wan.pool))
            await eventually(lambda: kv._batch is not None and not sending.done(), 2, "the sender is held up")
            await asyncio.sleep(0.05)
            kv.abort("client gone")
            for index in range(0, len(source.data), 4096):
                source.data[index] = 0xFF  # the blocks belong to someone else now
            wan.proxy.resume()
            with pytest.raises(TransferAborted):
                await sending
            sink = wan.md0.sinks["r"]
            assert await sink.result == ("transfer_aborted", "client gone"), "not kv_corrupt: the frame was a copy"
            same = wan.pool._idle[0]
            await outgoing(Memory(4, fill=2), "next", 64).deliver(wan.pool)
            assert wan.pool._idle[0] is same, "the connection survived"

    run(test())


def test_a_receiver_that_gives_up_is_not_written_to_any_more() -> None:
    async def test() -> None:
        async with Wan(connections=1) as wan:
            wan.proxy.rate_bytes_per_s = 2e6
            source = Memory(64, fill=1)
            sending = asyncio.create_task(outgoing(source, "r", 1000).deliver(wan.pool))
            await eventually(lambda: "r" in wan.md0.sinks, 2, "the transfer begins")
            await asyncio.sleep(0.05)
            wan.md0.sinks["r"].cancel()
            wan.md0.memory.data[:] = b"\xaa" * len(wan.md0.memory.data)
            with pytest.raises(TransferRefused) as refused:
                await sending
            assert refused.value.name == "cancelled"
            assert set(wan.md0.memory.data) == {0xAA}
            wan.proxy.rate_bytes_per_s = None
            await outgoing(source, "next", 500).deliver(wan.pool)

    run(test())


def test_transfers_queue_in_order_and_report_their_waiting_apart() -> None:
    async def test() -> None:
        async with Wan(connections=1) as wan:
            wan.proxy.rate_bytes_per_s = 1e6
            source = Memory(8, fill=1)
            finished: list[int] = []

            async def send(index: int) -> tuple[int, int]:
                delivered = await outgoing(source, f"r{index}", 100).deliver(wan.pool)
                finished.append(index)
                return delivered.queue_ns, delivered.received_ns - delivered.start_ns

            times = await asyncio.gather(*(send(index) for index in range(4)))
            assert finished == [0, 1, 2, 3]
            queues, transfers = zip(*times, strict=True)
            assert queues[0] == 0
            for index in range(1, 4):
                ahead = sum(transfers[:index])
                assert queues[index] == pytest.approx(ahead, rel=0.35), "waited for those ahead, and for nothing else"
            assert all(0.08e9 < transfer < 0.4e9 for transfer in transfers), "0.1 MB at 1 MB/s, waiting not counted"

    run(test())


def test_a_connection_that_breaks_fails_its_transfer_on_both_ends_and_is_dialled_again() -> None:
    async def test() -> None:
        async with Wan(connections=1) as wan:
            wan.proxy.rate_bytes_per_s = 1e6
            sending = asyncio.create_task(outgoing(Memory(64, fill=1), "r", 1000).deliver(wan.pool))
            await eventually(lambda: "r" in wan.md0.sinks, 2, "the transfer begins")
            wan.proxy.cut()
            with pytest.raises(ConnectionLost):
                await sending
            assert (await wan.md0.sinks["r"].result)[0] == "connection_lost"
            wan.proxy.rate_bytes_per_s = None
            await eventually(lambda: wan.pool.up == 1, 3, "dialled again")
            await outgoing(Memory(64, fill=1), "again", 1000).deliver(wan.pool)

    run(test())


def test_a_peer_that_takes_no_bytes_is_given_up_after_the_stall_deadline() -> None:
    async def test() -> None:
        async with Wan(connections=1) as wan:
            wan.proxy.pause()
            start = time.monotonic()
            with pytest.raises(
                Exception, match=r"no byte moved for 1\.0 s|did not answer within 2\.0 s|silent"
            ) as caught:
                await outgoing(Memory(4000), "r", 60_000).deliver(wan.pool)
            assert caught.value.name in ("deadline_exceeded", "connection_lost")  # type: ignore[attr-defined]
            assert time.monotonic() - start < 4

    run(test())


def test_a_slow_link_is_no_stall_however_long_the_whole_takes() -> None:
    async def test() -> None:
        async with Wan(connections=1) as wan:
            wan.proxy.rate_bytes_per_s = 450e3  # 1 MB: twice the stall and the reply deadline
            delivered = await outgoing(Memory(64, fill=1), "r", 1000).deliver(wan.pool)
            assert delivered.received_ns - delivered.start_ns > 1.9e9

    run(test())


def test_a_dead_peer_does_not_hold_up_another() -> None:
    async def test() -> None:
        p0, md0, md1 = End("p0", "prefill"), End("md0", "main-decode"), End("md1", "main-decode")
        md1.listener.close()
        p0.connect(md0, md1, connections=1)
        async with md0.connect(p0), p0:
            await p0.peers.wait_connected(["md0"], 3)
            dead = asyncio.create_task(outgoing(Memory(8, fill=1), "to-md1", 100).deliver(p0.peers.pools["md1"]))
            await outgoing(Memory(8, fill=1), "to-md0", 100).deliver(p0.peers.pools["md0"])
            assert not dead.done()
            with pytest.raises(PeerUnreachable, match=r"md1 is unreachable: cannot connect to md1 at .*refused"):
                await dead

    run(test())


def test_a_restarted_peer_is_found_again() -> None:
    async def test() -> None:
        p0, first = End("p0", "prefill"), End("md0", "main-decode")
        async with p0.connect(first, connections=2):
            async with first.connect(p0):
                await p0.peers.wait_connected(["md0"], 3)
            await eventually(lambda: p0.peers.connected() == [], 2, "md0's end is seen")
            second = End("md0", "main-decode")
            second.listener.close()
            second.listener = socket.create_server(("127.0.0.1", first.port))
            async with second.connect(p0):
                await p0.peers.wait_connected(["md0"], 5)
                await outgoing(Memory(8, fill=1), "r", 100).deliver(p0.peers.pools["md0"])
                assert (await second.sinks["r"].result)[0] == "complete"

    run(test())


def test_no_two_attempts_share_a_transfer_id() -> None:
    ids = {new_transfer_id("r") for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch(r"r\.[0-9a-f]{12}", name) for name in ids)
