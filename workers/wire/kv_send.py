"""Sending one sequence's KV: begin, blocks, end, and the receiver's answer. Owns no blocks and no connections."""

import asyncio
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import xxhash

from workers.wire.frames import WireError
from workers.wire.kv_pool import KvChannel, KvPool
from workers.wire.messages import KvAbort, KvBegin, KvBlocks, KvEnd, KvReceived, KvRefused, RequestSpec
from workers.wire.stream import Batch

FRAME_BODY_BYTES = 1 << 20  # blocks are grouped up to this size (one block at least)


class Storage(Protocol):
    """What a transfer needs of the block pool."""

    block_size: int
    bytes_per_token: int

    def view(self, block: int, num_tokens: int) -> memoryview:
        """The bytes of a block's first tokens."""
        ...


class TransferRefused(WireError):
    """The receiver will not take the KV; `error` is its name for why."""

    def __init__(self, refusal: KvRefused) -> None:
        super().__init__(refusal.reason)
        self.name = refusal.error
        self.held_blocks = refusal.held_blocks


class TransferAborted(WireError):
    """This side gave the transfer up."""

    name = "transfer_aborted"


@dataclass(frozen=True, slots=True)
class Delivered:
    """A transfer that arrived. Times are CLOCK_MONOTONIC; `received_ns` is the receiver's stamp."""

    queue_ns: int
    start_ns: int
    received_ns: int
    kv_bytes: int


def block_lengths(tokens: int, block_size: int) -> list[int]:
    """Tokens in each block of a sequence: all full but perhaps the last."""
    full, rest = divmod(tokens, block_size)
    return [block_size] * full + ([rest] if rest else [])


def new_transfer_id(request: str) -> str:
    """A name that no other attempt has or will have."""
    return f"{request}.{secrets.token_hex(6)}"


class OutgoingKv:
    """One attempt to give a peer the KV of `spec.prompt`, but for the `first_block` blocks that it has."""

    def __init__(
        self,
        spec: RequestSpec,
        storage: Storage,
        blocks: list[int],
        first_token: int,
        finish: str | None,
        first_block: int = 0,
    ) -> None:
        self._spec = spec
        self._first_block = first_block
        self._storage = storage
        self._blocks = blocks
        self._first_token = first_token
        self._finish = finish
        self._aborted: str | None = None
        self._batch: Batch | None = None
        self._answer: asyncio.Future[KvReceived | KvRefused] | None = None
        self._queueing: asyncio.Future[KvChannel] | None = None
        self.transfer = new_transfer_id(spec.id)
        self.kv_bytes = (len(spec.prompt) - first_block * storage.block_size) * storage.bytes_per_token

    def abort(self, reason: str) -> None:
        """Give up. When this returns the blocks are no longer read; the frame under way is finished from a copy."""
        if self._aborted is None:
            self._aborted = reason
            if self._batch is not None:
                self._batch.detach()
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(TransferAborted(reason))
            if self._queueing is not None:
                self._queueing.cancel()

    async def deliver(self, pool: KvPool) -> Delivered:
        """Queue for one of the peer's connections, send everything, wait for the answer, give the connection back.

        Raises TransferAborted, TransferRefused, PeerUnreachable, ConnectionLost, DeadlineExceeded.
        """
        self._check()
        queued_ns = time.monotonic_ns()
        channel = pool.take_idle()
        queue_ns = 0
        if channel is None:
            channel = await self._queue(pool)
            queue_ns = time.monotonic_ns() - queued_ns
        try:
            return await self._send(channel, queue_ns)
        finally:
            pool.release(channel)

    async def _queue(self, pool: KvPool) -> KvChannel:
        self._queueing = asyncio.ensure_future(pool.acquire())
        try:
            return await self._queueing
        except asyncio.CancelledError:
            self._check()
            raise
        finally:
            self._queueing = None

    async def _send(self, channel: KvChannel, queue_ns: int) -> Delivered:
        connection = channel.connection
        self._answer = answer = channel.expect(self.transfer)
        start_ns = time.monotonic_ns()
        try:
            self._check()
            begin = KvBegin(
                transfer=self.transfer,
                spec=self._spec,
                first_block=self._first_block,
                tokens=len(self._spec.prompt),
            )
            await connection.send(begin)
            for message, views in self._frames():
                if self._aborted is not None or answer.done():
                    break
                self._batch, kind, size = connection.batch(message, views)
                del views
                await connection.send_batch(self._batch, kind, size)
                self._batch = None
                await asyncio.sleep(0)  # a fast peer must not keep the loop from other requests
            if self._aborted is None and not answer.done():
                await connection.send(
                    KvEnd(transfer=self.transfer, first_token=self._first_token, finish_reason=self._finish)
                )
                await connection.drained(answer)
            else:
                await connection.send(KvAbort(transfer=self.transfer, reason=self._aborted or "refused"))
            received = await answer
        finally:
            self._batch = None
            channel.forget(self.transfer)
        if isinstance(received, KvRefused):
            raise TransferRefused(received)
        return Delivered(queue_ns, start_ns, received.received_ns, self.kv_bytes)

    def _check(self) -> None:
        if self._aborted is not None:
            raise TransferAborted(self._aborted)

    def _frames(self) -> Iterator[tuple[KvBlocks, list[memoryview]]]:
        lengths = block_lengths(len(self._spec.prompt), self._storage.block_size)
        first = self._first_block
        while first < len(lengths):
            views: list[memoryview] = []
            size = 0
            while first + len(views) < len(lengths) and (size < FRAME_BODY_BYTES or not views):
                index = first + len(views)
                views.append(self._storage.view(self._blocks[index], lengths[index]))
                size += len(views[-1])
            message = KvBlocks(
                transfer=self.transfer,
                first_block=first,
                tokens=lengths[first : first + len(views)],
                checksums=[xxhash.xxh3_64_intdigest(view) for view in views],
            )
            yield message, views
            first += len(views)
