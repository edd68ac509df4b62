"""A transfer in eight bits: a quarter of the bytes, checksums over what was sent, everything else as ever."""

import asyncio

import pytest
import torch

from tests.workers.serving import eventually, run
from tests.workers.wire.pair import BYTES_PER_TOKEN, FP8, Memory, Wan, outgoing
from tests.workers.wire.test_kv_protocol import begin, kv_connection
from workers.wire.kv_messages import KvBegin
from workers.wire.kv_send import TransferRefused
from workers.wire.stream import ConnectionLost


def floats(blocks: int) -> Memory:
    torch.manual_seed(3)
    memory = Memory(blocks)
    memory.data[:] = torch.randn(len(memory.data) // 4).numpy().tobytes()
    return memory


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 500])
def test_what_arrives_is_what_eight_bits_can_say_of_it(tokens: int) -> None:
    async def test() -> None:
        async with Wan() as wan:
            source = floats(32)
            wan.md0.memory.data[:] = b"\xee" * len(wan.md0.memory.data)
            delivered = await outgoing(source, "r", tokens, encoding=FP8).deliver(wan.pool)
            assert (await wan.md0.sinks["r"].result)[0] == "complete"
            size = tokens * BYTES_PER_TOKEN
            sent = torch.frombuffer(source.data[:size], dtype=torch.float32)
            there = torch.frombuffer(wan.md0.memory.data[:size], dtype=torch.float32)
            assert ((sent - there).abs() <= sent.abs() / 16 + 0.01).all()
            assert not torch.equal(sent, there)
            assert set(wan.md0.memory.data[size:]) == {0xEE}
            assert delivered.kv_bytes == tokens * FP8.bytes_per_token
            on_wire = wan.p0.local.counters.bytes("md0", "sent", "kv")
            assert delivered.kv_bytes < on_wire < delivered.kv_bytes * 1.02 + 200
            assert on_wire < size * 0.4 + 200

    run(test())


def test_a_spoilt_block_is_noticed_before_it_is_decoded() -> None:
    async def test() -> None:
        async with Wan(connections=1) as wan:
            wan.proxy.spoil_at = 30_000
            await eventually(lambda: wan.pool.up == 1, 5, "up")
            wan.proxy.cut()  # what is spoilt counts from a connection's beginning, on those made from now on
            await eventually(lambda: wan.pool.up == 0, 5, "down")
            with pytest.raises(TransferRefused) as refused:
                await outgoing(floats(32), "r", 500, encoding=FP8).deliver(wan.pool)
            assert refused.value.name == "kv_corrupt"
            assert not any(wan.md0.memory.data), "nothing of the frame is in the blocks"

    run(test())


def test_a_receiver_that_gives_up_is_not_written_to_any_more() -> None:
    async def test() -> None:
        async with Wan(connections=1, rate_bytes_per_s=1e6) as wan:
            sending = asyncio.create_task(outgoing(floats(64), "r", 1000, encoding=FP8).deliver(wan.pool))
            await eventually(lambda: "r" in wan.md0.sinks, 5, "the transfer begins")
            wan.md0.sinks["r"].cancel()
            wan.md0.memory.data[:] = b"\xaa" * len(wan.md0.memory.data)
            with pytest.raises(TransferRefused):
                await sending
            assert set(wan.md0.memory.data) == {0xAA}

    run(test())


@pytest.mark.parametrize("name", ["fp4", "FP8"])
def test_an_encoding_that_is_not_known_closes_the_connection(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Wan() as wan:
            connection = await kv_connection(wan.p0, wan.md0)
            plain = begin(16, of=16)
            assert isinstance(plain, KvBegin)
            await connection.send(KvBegin(transfer="t", spec=plain.spec, first_block=0, tokens=16, encoding=name))
            with pytest.raises(ConnectionLost):
                await connection.receive()
            await eventually(lambda: f"KV in encoding {name}; known here: fp8" in caplog.text, 2, "the log says why")

    caplog.set_level("INFO")
    run(test())
