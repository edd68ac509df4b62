"""Receiving KV straight into blocks: the listener's end of a KV connection. What follows is the sink's business."""

import asyncio
import itertools
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import xxhash

from workers.wire.connection import Connection
from workers.wire.frames import FrameError, Kind, WireError
from workers.wire.kv_encoding import KvEncoding
from workers.wire.kv_messages import KvAbort, KvBegin, KvBlocks, KvEnd, KvReceived, KvRefused, Padding
from workers.wire.kv_send import block_lengths
from workers.wire.messages import TokenLogprob
from workers.wire.stream import Target

MAX_ENCODED_BYTES = 16 << 20  # in one frame: it is read into memory of its own before it is decoded

_KINDS = frozenset({Kind.CONTROL, Kind.KV, Kind.PADDING})


class RefuseTransfer(Exception):
    """Raised by `Receiver.begin`: the KV cannot be taken. `error` is the name that clients and records see."""

    def __init__(self, error: str, reason: str, held_blocks: int | None = None) -> None:
        super().__init__(reason)
        self.error = error
        self.held_blocks = held_blocks


class CorruptKv(WireError):
    """A block is not what was sent."""

    name = "kv_corrupt"


class IncomingKv(Protocol):
    """The place of one transfer."""

    def views(self, first_block: int, tokens: list[int]) -> list[memoryview]:
        """Memory for consecutive blocks of the sequence."""
        ...

    def attach(self, target: Target | None) -> None:
        """The target that bytes are flowing to: to be detached when the request is cancelled. None: no more."""
        ...

    def verified(self, blocks: int) -> None:
        """So many more blocks, in order, are there and right."""
        ...

    def complete(
        self, first_token: int, finish_reason: str | None, received_ns: int, first_logprob: TokenLogprob | None
    ) -> None:
        """Everything is there."""
        ...

    def failed(self, error: str, reason: str) -> None:
        """It will not be."""
        ...

    @property
    def cancelled(self) -> bool:
        """The blocks are no longer this transfer's."""
        ...


class Receiver(Protocol):
    """The role that takes transfers."""

    block_size: int
    bytes_per_token: int

    def begin(self, begin: KvBegin) -> IncomingKv:
        """Reserve blocks, and hold on to those before `first_block`. Raises RefuseTransfer."""
        ...


class _Current:
    """The transfer that a connection is carrying. `sink` is None once nobody wants it."""

    def __init__(
        self, begin: KvBegin, sink: IncomingKv | None, receiver: Receiver, encoding: KvEncoding | None
    ) -> None:
        self.transfer = begin.transfer
        self.encoding = encoding
        self.bytes_per_token = receiver.bytes_per_token if encoding is None else encoding.bytes_per_token
        self.lengths = block_lengths(begin.tokens, receiver.block_size)  # of the whole prompt
        self.next_block = begin.first_block
        self.sink = sink


async def receive_transfers(
    connection: Connection, receiver: Receiver, encodings: Mapping[str, KvEncoding] = MappingProxyType({})
) -> None:
    """Serve a KV connection until it ends. Raises WireError then; a transfer under way has failed by that time.

    `encodings`: by name, in how else than as it is in the pool KV may come.
    """
    current: _Current | None = None
    try:
        while True:
            message, header = await connection.receive(idle_ok=current is None, only=_KINDS)
            if isinstance(message, Padding):
                await connection.read_body(Target.nowhere(header.body_bytes))
                continue
            if isinstance(message, KvBegin):
                if current is not None:
                    raise FrameError(f"transfer {message.transfer} begins while {current.transfer} is under way")
                current = await _begin(connection, receiver, message, encodings)
                continue
            if not isinstance(message, KvBlocks | KvEnd | KvAbort):
                raise FrameError(f"{type(message).__name__} on a KV connection")
            if current is None or message.transfer != current.transfer:
                raise FrameError(f"{type(message).__name__} of transfer {message.transfer}, which is not under way")
            if isinstance(message, KvBlocks):
                await _blocks(connection, current, message, header.body_bytes)
                await asyncio.sleep(0)  # a fast sender must not keep the loop from other requests
                continue
            if isinstance(message, KvEnd):
                await _end(connection, current, message)
            elif current.sink is not None:
                current.sink.failed("transfer_aborted", message.reason)
            current = None
    except BaseException as error:
        if current is not None and current.sink is not None:
            current.sink.failed(getattr(error, "name", "wire_error"), str(error))
        connection.close(str(error))
        raise


async def _begin(
    connection: Connection, receiver: Receiver, begin: KvBegin, encodings: Mapping[str, KvEncoding]
) -> _Current:
    if begin.first_block * receiver.block_size > begin.tokens or begin.tokens != len(begin.spec.prompt):
        raise FrameError(
            f"transfer of {begin.tokens} tokens from block {begin.first_block} for a prompt of "
            f"{len(begin.spec.prompt)}: it must end where the prompt ends"
        )
    encoding = None
    if begin.encoding is not None and (encoding := encodings.get(begin.encoding)) is None:
        known = ", ".join(encodings) or "none"
        raise FrameError(f"transfer {begin.transfer} has KV in encoding {begin.encoding}; known here: {known}")
    try:
        sink = receiver.begin(begin)
    except RefuseTransfer as refusal:
        refused = KvRefused(
            transfer=begin.transfer, error=refusal.error, reason=str(refusal), held_blocks=refusal.held_blocks
        )
        await connection.send(refused)
        return _Current(begin, None, receiver, encoding)
    return _Current(begin, sink, receiver, encoding)


async def _blocks(connection: Connection, current: _Current, message: KvBlocks, body_bytes: int) -> None:
    first, count = message.first_block, len(message.tokens)
    expected = current.lengths[current.next_block : current.next_block + count]
    if first != current.next_block or message.tokens != expected or len(message.checksums) != count:
        raise FrameError(f"blocks {first}+{count} of transfer {current.transfer}; {current.next_block} is next")
    sizes = [tokens * current.bytes_per_token for tokens in message.tokens]
    if body_bytes != sum(sizes):
        raise FrameError(
            f"{body_bytes} bytes of KV for {sum(message.tokens)} tokens of {current.bytes_per_token} bytes each"
        )
    if current.encoding is not None and body_bytes > MAX_ENCODED_BYTES:
        raise FrameError(f"{body_bytes} bytes of encoded KV in one frame; at most {MAX_ENCODED_BYTES}")
    current.next_block += count
    if current.sink is None or current.sink.cancelled:
        await connection.read_body(Target.nowhere(body_bytes))
        await _refuse_cancelled(connection, current)
        return
    views = arriving = current.sink.views(first, message.tokens)
    if current.encoding is not None:
        arriving = _cut(memoryview(bytearray(body_bytes)), sizes)
    target = Target(arriving)
    current.sink.attach(target)
    await connection.read_body(target)
    current.sink.attach(None)
    if target.detached:
        await _refuse_cancelled(connection, current)
        return
    for index, (view, checksum) in enumerate(zip(arriving, message.checksums, strict=True), first):
        if xxhash.xxh3_64_intdigest(view) != checksum:
            error = CorruptKv(f"KV block {index} of transfer {current.transfer} does not match its checksum")
            current.sink.failed(error.name, str(error))
            current.sink = None
            await connection.send(KvRefused(transfer=current.transfer, error=error.name, reason=str(error)))
            return
    if current.encoding is not None:
        for data, into in zip(arriving, views, strict=True):
            current.encoding.decode(data, into)
    current.sink.verified(count)


def _cut(data: memoryview, sizes: list[int]) -> list[memoryview]:
    """Consecutive pieces of these sizes."""
    ends = itertools.accumulate(sizes)
    return [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]


async def _end(connection: Connection, current: _Current, end: KvEnd) -> None:
    if current.next_block != len(current.lengths):
        raise FrameError(f"transfer {current.transfer} ends at block {current.next_block} of {len(current.lengths)}")
    await _refuse_cancelled(connection, current)
    if current.sink is not None:
        received_ns = time.monotonic_ns()
        current.sink.complete(end.first_token, end.finish_reason, received_ns, end.first_logprob)
        await connection.send(KvReceived(transfer=current.transfer, received_ns=received_ns))


async def _refuse_cancelled(connection: Connection, current: _Current) -> None:
    if current.sink is not None and current.sink.cancelled:
        current.sink = None
        await connection.send(
            KvRefused(transfer=current.transfer, error="cancelled", reason="the receiver has given the request up")
        )
