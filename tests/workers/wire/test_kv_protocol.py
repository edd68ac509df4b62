"""A sender that breaks the rules of a KV transfer loses its connection, and its transfer fails by name."""

import asyncio
import socket
import struct

import pytest
import xxhash

from tests.workers.serving import eventually, run
from tests.workers.wire.pair import BLOCK_SIZE, BYTES_PER_TOKEN, End, QuickPath, spec
from workers.wire import frames
from workers.wire.connection import Connection, dial
from workers.wire.frames import Kind
from workers.wire.kv_messages import KvAbort, KvBegin, KvBlocks, KvEnd, KvReceived
from workers.wire.messages import HandOver, Message, Tokens
from workers.wire.stream import ConnectionLost

BLOCK = b"k" * (BLOCK_SIZE * BYTES_PER_TOKEN)


def begin(tokens: int = 40, first_block: int = 0, of: int = 40) -> Message:
    return KvBegin(transfer="t", spec=spec("r", of), first_block=first_block, tokens=tokens)


def blocks(first: int, tokens: list[int], transfer: str = "t", checksums: int | None = None) -> Message:
    sums = [xxhash.xxh3_64_intdigest(BLOCK[: count * BYTES_PER_TOKEN]) for count in tokens]
    return KvBlocks(transfer=transfer, first_block=first, tokens=tokens, checksums=sums[: checksums or None])


def body(tokens: int) -> list[memoryview]:
    return [memoryview(bytes(tokens * BYTES_PER_TOKEN).replace(b"\0", b"k"))]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([(begin(39), 0)], "must end where the prompt ends"),
        ([(begin(first_block=3), 0)], "must end where the prompt ends"),
        ([(begin(first_block=1), 0), (blocks(0, [16]), 16)], "1 is next"),
        ([(begin(first_block=1), 0), (KvEnd(transfer="t", first_token=1), 0)], "ends at block 1 of 3"),
        ([(begin(), 0), (begin(), 0)], "begins while t is under way"),
        ([(blocks(0, [16]), 16)], "not under way"),
        ([(KvEnd(transfer="t", first_token=1), 0)], "not under way"),
        ([(KvAbort(transfer="t", reason="x"), 0)], "not under way"),
        ([(begin(), 0), (blocks(0, [16], transfer="u"), 16)], "transfer u, which is not under way"),
        ([(begin(), 0), (blocks(1, [16]), 16)], "0 is next"),
        ([(begin(), 0), (blocks(0, [16, 16, 16]), 48)], "0 is next"),
        ([(begin(), 0), (blocks(0, [8]), 8)], "0 is next"),
        ([(begin(), 0), (blocks(0, [16, 16, 8, 16]), 56)], "0 is next"),
        ([(begin(), 0), (blocks(0, [16]), 17)], "17000 bytes of KV for 16 tokens"),
        ([(begin(), 0), (blocks(0, [16, 16], checksums=1), 32)], "0 is next"),
        ([(begin(), 0), (blocks(0, [16]), 16), (KvEnd(transfer="t", first_token=1), 0)], "ends at block 1 of 3"),
        ([(KvReceived(transfer="t", received_ns=1), 0)], "KvReceived on a KV connection"),
        ([(HandOver(request="r"), 0)], "HandOver on a KV connection"),
        ([(Tokens(request="r", position=1, ids=[1]), 0)], "TOKEN_IDS frame on a kv connection"),
    ],
)
def test_a_broken_rule_closes_the_connection(
    messages: list[tuple[Message, int]], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        p0, md0 = End("p0", "prefill"), End("md0", "main-decode")
        async with md0.connect(p0):
            connection = await kv_connection(p0, md0)
            for message, tokens in messages:
                await connection.send(message, body(tokens) if tokens else ())
            with pytest.raises(ConnectionLost):
                await connection.receive()
            if "r" in md0.sinks:
                error, reason = await md0.sinks["r"].result
                assert error == "bad_frame"
                assert complaint in reason
            await eventually(lambda: complaint in caplog.text, 2, "the log says why")

    caplog.set_level("INFO")
    run(test())


@pytest.mark.parametrize("channel", ["control", "kv"])
def test_an_oversize_length_closes_the_connection_before_anything_is_read(channel: str) -> None:
    async def test() -> None:
        p0, md0 = End("p0", "prefill"), End("md0", "main-decode")
        async with md0.connect(p0):
            connection = await dial("127.0.0.1", md0.port, "md0", channel, p0.local, QuickPath())
            raw = struct.pack("!4sHHIQI", frames.MAGIC, frames.PROTOCOL_VERSION, Kind.CONTROL, 2**32 - 1, 0, 0)
            connection._stream._sock.send(raw)
            with pytest.raises(ConnectionLost):
                await until_closed(connection)

    run(test())


def test_an_oversize_hello_is_refused_before_it_is_read() -> None:
    async def test() -> None:
        md0 = End("md0", "main-decode")
        async with md0.connect(End("p0", "prefill")):
            with socket.create_connection(("127.0.0.1", md0.port)) as sock:
                sock.sendall(struct.pack("!4sHHIQI", frames.MAGIC, frames.PROTOCOL_VERSION, Kind.HANDSHAKE, 5000, 0, 0))
                sock.setblocking(False)
                loop = asyncio.get_running_loop()
                answer = b""
                while data := await loop.sock_recv(sock, 4096):
                    answer += data
                assert b"HANDSHAKE message of 5000 bytes exceeds the limit of 4096" in answer

    run(test())


def test_a_transfer_by_the_rules_is_acknowledged() -> None:
    async def test() -> None:
        p0, md0 = End("p0", "prefill"), End("md0", "main-decode")
        async with md0.connect(p0):
            connection = await kv_connection(p0, md0)
            await connection.send(begin(16, of=16))
            await connection.send(blocks(0, [16]), [memoryview(BLOCK)])
            await connection.send(KvEnd(transfer="t", first_token=7))
            answer, _ = await connection.receive()
            assert isinstance(answer, KvReceived)
            assert bytes(md0.memory.view(0, 16)) == BLOCK
            connection.close("done")

    run(test())


async def kv_connection(p0: End, md0: End) -> Connection:
    return await dial("127.0.0.1", md0.port, "md0", "kv", p0.local, QuickPath())


async def until_closed(connection: Connection) -> None:
    while True:
        await connection.receive()
