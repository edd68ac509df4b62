"""Clients that do what a gateway must survive: leave at any moment, stall, send nonsense, ask for odd things.

Each is a coroutine of a port and a source of chance. One that gets an answer checks that it is one: OpenAI's shape, and
no status of the gateway's own fault.
"""

import asyncio
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

WITHIN_S = 60.0
ODD: tuple[Any, ...] = (
    None, True, False, 0, -0.0, 1, -1, 2, 3, 129, 5e-324, 2.2e-308, 1e-310, 1e-5, 0.999999, 1.0000001, 1e308, -1e308,
    2**31, 2**31 + 1, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, "", "x", "\ud83d\ude00", "\u0000", "NaN",
    "1", [], [[]], [None], ["", ""], ["a"] * 17, {}, {"a": {}}, [1.5], [10**30], [-1],
)  # fmt: skip
FIELDS = (
    "temperature", "top_p", "seed", "n", "max_tokens", "stop", "stop_token_ids", "logprobs", "echo", "stream",
    "stream_options", "ignore_eos", "prompt", "messages", "model", "user", "metadata", "logit_bias", "top_k", "min_p",
    "presence_penalty", "frequency_penalty", "best_of", "suffix", "top_logprobs", "max_completion_tokens", "tools",
)  # fmt: skip
NONSENSE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n" * 300,
    b"GET /health HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\nHost: x\r\n\r\n", b"\x00" * 5000, b"A" * 100_000,
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
)  # fmt: skip


class Wrong(Exception):
    """An answer that no request deserves."""


@asynccontextmanager
async def _dialled(port: int) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()


def _post(body: bytes, path: str = "completions", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {size}\r\n\r\n".encode() + body


def _question(chance: random.Random, **fields: Any) -> bytes:
    tokens = chance.choice((1, 5, 50, 400))
    asked = {"prompt": "x" * chance.randint(1, 60), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return _post(json.dumps({**asked, **fields}).encode())


async def leaves(port: int, chance: random.Random) -> None:
    """Sends a request, or a part of one, and closes or resets at some moment."""
    request = chance.choice(
        (
            _question(chance),
            _question(chance, stream=True),
            _question(chance, n=3, stream=True),
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * chance.choice((1, 8)),
            b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
            _post(b'{"prompt": 1}'),
        )
    )
    if chance.random() < 0.3:
        request = request[: chance.randrange(len(request))]
    async with _dialled(port) as (reader, writer):
        writer.write(request)
        with suppress(TimeoutError):
            async with asyncio.timeout(chance.choice((0, 0.001, 0.01, 0.1, 0.5))):
                await reader.read(chance.choice((1, 300, 5000)))
                await reader.read(1)
        if chance.random() < 0.5:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


async def reads_slowly(port: int, chance: random.Random) -> None:
    """Takes its stream drop by drop, for a while."""
    async with _dialled(port) as (reader, writer):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.write(_question(chance, stream=True, max_tokens=400, logprobs=5))
        for _ in range(chance.randint(5, 40)):
            await reader.read(100)
            await asyncio.sleep(0.05)


async def stalls(port: int, chance: random.Random) -> None:
    """Announces a body and sends a part of it; or a part of a head."""
    size = chance.choice((100, 100_000, 15 << 20))
    async with _dialled(port) as (_, writer):
        writer.write(
            _post(b'{"prompt": "' + b"x" * chance.randrange(size // 2), length=size)[: chance.randrange(1, size)]
        )
        await asyncio.sleep(chance.choice((0.2, 1, 3)))


async def holds_many(port: int, chance: random.Random) -> None:
    """A crowd of connections without a request."""
    writers = []
    for _ in range(chance.choice((20, 200))):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
    await asyncio.sleep(chance.choice((0.1, 1)))
    for writer in writers:
        writer.close()


async def talks_nonsense(port: int, chance: random.Random) -> None:
    """No HTTP, or bytes of a request that were changed."""
    data = bytearray(chance.choice((*NONSENSE, _question(chance))))
    if chance.random() < 0.5:
        for _ in range(chance.randint(1, 5)):
            data[chance.randrange(len(data))] = chance.randrange(256)
    async with _dialled(port) as (reader, writer):
        writer.write(bytes(data))
        writer.write_eof()
        async with asyncio.timeout(WITHIN_S):
            with suppress(ConnectionError):
                _check(await reader.read())


async def asks_oddly(port: int, chance: random.Random) -> None:
    """Odd values in one to three fields; half-closes, so that the answer's end is the connection's."""
    chat = chance.random() < 0.3
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    asked |= {"max_tokens": 4}
    for field in chance.sample(FIELDS, chance.randint(1, 3)):
        asked[field] = chance.choice(ODD)
    if asked["max_tokens"] is None and "n" in asked:
        asked["max_tokens"] = 4
    async with _dialled(port) as (reader, writer):
        writer.write(_post(json.dumps(asked).encode(), "chat/completions" if chat else "completions"))
        writer.write_eof()
        async with asyncio.timeout(WITHIN_S):
            answer = await reader.read()
        if not answer:
            raise Wrong(f"no answer to {json.dumps(asked)[:500]}")
        _check(answer)


async def asks_dearly(port: int, chance: random.Random) -> None:
    """Megabytes of nothing."""
    item, end = chance.choice(((b"[],", b"[]"), (b'"",', b'""'), (b"1,", b"1"), (b"{},", b"{}")))
    field = chance.choice((b"metadata", b"stop", b"stop_token_ids", b"logit_bias", b"prompt"))
    body = b'{"max_tokens":1,"prompt":"x","' + field + b'":[' + item * chance.choice((1000, 500_000)) + end + b"]}"
    async with _dialled(port) as (reader, writer):
        writer.write(_post(body))
        writer.write_eof()
        async with asyncio.timeout(WITHIN_S):
            with suppress(ConnectionError):
                _check(await reader.read())


KINDS: dict[str, Callable[[int, random.Random], Awaitable[None]]] = {
    "leaves": leaves,
    "reads slowly": reads_slowly,
    "stalls": stalls,
    "holds many": holds_many,
    "talks nonsense": talks_nonsense,
    "asks oddly": asks_oddly,
    "asks dearly": asks_dearly,
}
WEIGHTS = (40, 8, 10, 3, 15, 30, 4)


def _check(answer: bytes) -> None:
    """No status of the gateway's own fault, and errors of OpenAI's shape."""
    while answer.startswith(b"HTTP/1.1 100 "):
        answer = answer.partition(b"\r\n\r\n")[2]
    if not answer:
        return  # what was sent may have been no whole request
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    if status >= 500 and status != 503:
        raise Wrong(f"{status}: {body[:500]!r}")
    if status >= 400 and b"application/json" in head.lower() and b'"error"' not in body:
        raise Wrong(f"{status} without an error: {body[:500]!r}")
