"""More transfers than connections: first come, first served, and waiting is no part of a transfer's time."""

import asyncio
import time

import pytest

from tests.workers.serving import eventually, run
from tests.workers.wire.pair import BYTES_PER_TOKEN, Memory, Wan, outgoing
from workers.wire.kv_send import Delivered, TransferAborted

TOKENS = 100
CONNECTIONS = 3
TRANSFERS = 12


@pytest.mark.parametrize("connections", [1, CONNECTIONS])
def test_transfers_begin_in_the_order_they_were_asked_for_as_connections_become_free(connections: int) -> None:
    async def test() -> None:
        async with Wan(connections=connections, rate_bytes_per_s=2e6) as wan:
            memory, asked_ns = Memory(8, fill=1), []

            async def send(index: int) -> Delivered:
                asked_ns.append(time.monotonic_ns())
                return await outgoing(memory, f"r{index}", TOKENS).deliver(wan.pool)

            delivered = await asyncio.gather(*(send(index) for index in range(TRANSFERS)))
            starts = [one.start_ns for one in delivered]
            assert starts == sorted(starts)
            for index, (one, asked) in enumerate(zip(delivered, asked_ns, strict=True)):
                assert (one.queue_ns > 0) == (index >= connections)
                assert asked + one.queue_ns <= one.start_ns, "queue time ends where the transfer begins"
                assert one.kv_bytes == TOKENS * BYTES_PER_TOKEN
                under_way = sum(other.start_ns <= one.start_ns < other.received_ns for other in delivered)
                assert under_way <= connections
                # it waited for as many as had to end before it, not for one more
                ended = sum(other.received_ns <= one.start_ns for other in delivered[:index])
                assert ended >= index - connections + 1

    run(test())


def test_who_gives_up_while_waiting_lets_the_next_one_go_first() -> None:
    async def test() -> None:
        async with Wan(connections=1, rate_bytes_per_s=1e6) as wan:
            memory = Memory(8, fill=1)
            kvs = [outgoing(memory, f"r{index}", TOKENS) for index in range(4)]
            sending = [asyncio.create_task(kv.deliver(wan.pool)) for kv in kvs]
            await eventually(lambda: "r0" in wan.md0.sinks and len(wan.pool._waiters) == 3, 5, "three wait")
            kvs[1].abort("client gone")
            with pytest.raises(TransferAborted):
                await sending[1]
            third, fourth = await asyncio.gather(sending[2], sending[3])
            assert third.start_ns < fourth.start_ns
            assert list(wan.md0.sinks) == ["r0", "r2", "r3"]
            assert not wan.pool._waiters

    run(test())


def test_a_connection_that_breaks_serves_the_queue_again_once_it_is_back() -> None:
    async def test() -> None:
        async with Wan(connections=1, rate_bytes_per_s=1e6) as wan:
            memory = Memory(8, fill=1)
            sending = [
                asyncio.create_task(outgoing(memory, f"r{index}", TOKENS).deliver(wan.pool)) for index in range(3)
            ]
            await eventually(lambda: "r0" in wan.md0.sinks and len(wan.pool._waiters) == 2, 5, "two wait")
            wan.proxy.cut()
            results = await asyncio.gather(*sending, return_exceptions=True)
            assert getattr(results[0], "name", None) == "connection_lost"
            assert [type(result) for result in results[1:]] == [Delivered, Delivered]
            assert results[1].start_ns < results[2].start_ns  # type: ignore[union-attr]

    run(test())
