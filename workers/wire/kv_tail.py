"""KV of generated tokens from relay decode to main decode (hand-over `kv`): both ends of one connection of the pool.

Owns no blocks. The sender reads its blocks in place until it is aborted; the receiver reads a frame into memory of its
own and gives it to the role when it is whole and right: a frame is small, and nothing has to be detached.
"""

import asyncio
import time
from collections.abc import Iterator
from typing import Protocol

import xxhash

from workers.wire.connection import Connection
from workers.wire.frames import FrameError, Kind
from workers.wire.kv_messages import KvReceived, KvRefused, KvTail, Padding
from workers.wire.kv_pool import KvChannel, KvPool
from workers.wire.kv_receive import CorruptKv
from workers.wire.kv_send import Delivered, Storage, TransferAborted, TransferRefused, new_transfer_id
from workers.wire.stream import Batch, Target

FRAME_BODY_BYTES = 256 << 10  # one token at least
MAX_BODY_BYTES = 16 << 20

_KINDS = frozenset({Kind.KV, Kind.PADDING})


class OutgoingTail:
    """The KV of positions [start, end) of one sequence, on its way to one peer."""

    def __init__(self, request: str, storage: Storage, blocks: list[int], start: int, end: int) -> None:
        self._request = request
        self._storage = storage
        self._blocks = blocks
        self._start, self._end = start, end
        self._aborted = False
        self._batch: Batch | None = None
        self._answer: asyncio.Future[KvReceived | KvRefused] | None = None
        self.transfer = new_transfer_id(request)
        self.kv_bytes = (end - start) * storage.bytes_per_token

    def abort(self) -> None:
        """When this returns the blocks are no longer read; the frame under way is finished from a copy."""
        self._aborted = True
        if self._batch is not None:
            self._batch.detach()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(TransferAborted("the request is over"))

    async def deliver(self, pool: KvPool) -> Delivered:
        """Send everything and wait for the answer. Not to be cancelled: that may cut a frame in half; `abort` instead.

        Raises TransferAborted, TransferRefused, PeerUnreachable, ConnectionLost, DeadlineExceeded.
        """
        queued_ns = time.monotonic_ns()
        channel = pool.take_idle() or await pool.acquire()
        start_ns = time.monotonic_ns()
        try:
            received = await self._send(channel)
        finally:
            pool.release(channel)
        return Delivered(start_ns - queued_ns, start_ns, received.received_ns, self.kv_bytes)

    async def _send(self, channel: KvChannel) -> KvReceived:
        connection = channel.connection
        self._answer = answer = channel.expect(self.transfer)
        try:
            for message, views in self._frames():
                if self._aborted:
                    raise TransferAborted("the request is over")
                if answer.done():
                    break
                self._batch, kind, size = connection.batch(message, views)
                del views
                await connection.send_batch(self._batch, kind, size)
                self._batch = None
                await asyncio.sleep(0)  # a fast peer must not keep the loop from other requests
            await connection.drained(answer)
            received = await answer
        finally:
            self._batch = None
            channel.forget(self.transfer)
        if isinstance(received, KvRefused):
            raise TransferRefused(received)
        return received

    def _frames(self) -> Iterator[tuple[KvTail, list[memoryview]]]:
        each = self._storage.bytes_per_token
        step = max(1, FRAME_BODY_BYTES // each)
        for position in range(self._start, self._end, step):
            end = min(position + step, self._end)
            views = list(token_views(self._storage, self._blocks, position, end))
            checksum = xxhash.xxh3_64()
            for view in views:
                checksum.update(view)
            message = KvTail(
                transfer=self.transfer,
                request=self._request,
                position=position,
                tokens=end - position,
                checksum=checksum.intdigest(),
                last=end == self._end,
            )
            yield message, views


def token_views(storage: Storage, blocks: list[int], start: int, end: int) -> Iterator[memoryview]:
    """The bytes of the KV of positions [start, end), block by block."""
    size, each = storage.block_size, storage.bytes_per_token
    while start < end:
        index, first = divmod(start, size)
        until = min(size, first + end - start)
        yield storage.view(blocks[index], until)[first * each :]
        start += until - first


class TailReceiver(Protocol):
    """The role that takes generated tokens' KV."""

    bytes_per_token: int

    def take_tail(self, peer: str, tail: KvTail, kv: memoryview) -> str | None:
        """Put it where it belongs; else the reason why it is not wanted."""
        ...


async def receive_tails(connection: Connection, receiver: TailReceiver) -> None:
    """Serve a relay's KV connection until it ends. Raises WireError then."""
    refused = ""  # the transfer of which no more is wanted
    while True:
        message, header = await connection.receive(only=_KINDS)
        if isinstance(message, Padding):
            await connection.read_body(Target.nowhere(header.body_bytes))
            continue
        if not isinstance(message, KvTail):
            raise FrameError(f"{type(message).__name__} on a relay's KV connection")
        if header.body_bytes != message.tokens * receiver.bytes_per_token or header.body_bytes > MAX_BODY_BYTES:
            raise FrameError(
                f"{header.body_bytes} bytes of KV for {message.tokens} tokens of {receiver.bytes_per_token} bytes "
                f"each, of at most {MAX_BODY_BYTES} bytes"
            )
        if message.transfer == refused:
            await connection.read_body(Target.nowhere(header.body_bytes))
            continue
        kv = memoryview(bytearray(header.body_bytes))
        await connection.read_body(Target([kv]))
        error, reason = "cancelled", None
        if xxhash.xxh3_64_intdigest(kv) != message.checksum:
            error, reason = CorruptKv.name, f"KV from position {message.position} does not match its checksum"
        else:
            reason = receiver.take_tail(connection.peer, message, kv)
        if reason is not None:
            refused = message.transfer
            await connection.send(KvRefused(transfer=message.transfer, error=error, reason=reason))
        elif message.last:
            await connection.send(KvReceived(transfer=message.transfer, received_ns=time.monotonic_ns()))
