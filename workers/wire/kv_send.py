"""Sending one sequence's KV: begin, blocks, end, and the receiver's answer. Owns no blocks and no connections."""

import asyncio
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from workers.wire.connection import Connection
from workers.wire.frames import WireError
from workers.wire.kv_encoding import KvEncoding
from workers.wire.kv_messages import KvAbort, KvBegin, KvBlocks, KvEnd, KvReceived, KvRefused, Padding
from workers.wire.kv_pool import KvChannel, KvPool
from workers.wire.kv_source import KvSource
from workers.wire.messages import RequestSpec
from workers.wire.stream import Batch

FRAME_BODY_BYTES = 1 << 20  # blocks are grouped up to this size (one block at least)


class Storage(Protocol):
    """A block pool, as a transfer needs it."""

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
    chunks: int = 0
    """So many times something left while prefill still computed."""
    waited_ns: int = 0
    """Time for which the connection was held with nothing to send."""


def block_lengths(tokens: int, block_size: int) -> list[int]:
    """Tokens in each block of a sequence: all full but perhaps the last."""
    full, rest = divmod(tokens, block_size)
    return [block_size] * full + ([rest] if rest else [])


def new_transfer_id(request: str) -> str:
    """A name that no other attempt has or will have."""
    return f"{request}.{secrets.token_hex(6)}"


class OutgoingKv:
    """One attempt to give a peer the KV of `spec.prompt`, but for the `first_block` blocks that it has.

    While `source` is unfinished, full blocks leave as soon as `chunk_tokens` tokens of them are final: the connection
    is taken for the first such chunk and kept to the end.
    """

    def __init__(
        self,
        spec: RequestSpec,
        storage: Storage,
        blocks: list[int],
        source: KvSource,
        first_block: int = 0,
        chunk_tokens: int = 1,
        encoding: KvEncoding | None = None,
        attempt: int = 0,
    ) -> None:
        self._spec = spec
        self._first_block = first_block
        self._attempt = attempt
        self._storage = storage
        self._blocks = blocks
        self._source = source
        self._chunk_blocks = max(1, chunk_tokens // storage.block_size)
        self._lengths = block_lengths(len(spec.prompt), storage.block_size)
        self._aborted: str | None = None
        self._batch: Batch | None = None
        self._given_up: asyncio.Future[None] | None = None
        self._answer: asyncio.Future[KvReceived | KvRefused] | None = None
        self._queueing: asyncio.Future[KvChannel] | None = None
        self._chunks = 0
        self._waited_ns = 0
        self.transfer = new_transfer_id(spec.id)
        self._encoding = encoding
        bytes_per_token = storage.bytes_per_token if encoding is None else encoding.bytes_per_token
        self.kv_bytes = (len(spec.prompt) - first_block * storage.block_size) * bytes_per_token

    def abort(self, reason: str) -> None:
        """Give up. When this returns the blocks are no longer read; the frame under way is finished from a copy."""
        if self._aborted is None:
            self._aborted = reason
            if self._batch is not None:
                self._batch.detach()
            if self._given_up is not None and not self._given_up.done():
                self._given_up.set_result(None)
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(TransferAborted(reason))
            if self._queueing is not None:
                self._queueing.cancel()

    async def deliver(self, pool: KvPool) -> Delivered:
        """Queue for one of the peer's connections, send everything, wait for the answer, give the connection back.

        Raises TransferAborted, TransferRefused, PeerUnreachable, ConnectionLost, DeadlineExceeded.
        """
        await self._first_chunk()
        queued_ns = time.monotonic_ns()
        channel = pool.take_idle()
        queue_ns = 0
        if channel is None:
            channel = await self._queue(pool)
            queue_ns = time.monotonic_ns() - queued_ns
        try:
            return await self._send(channel, queue_ns, pool)
        finally:
            pool.release(channel)

    async def _first_chunk(self) -> None:
        """Wait until there is something to send."""
        self._given_up = asyncio.get_running_loop().create_future()
        while self._aborted is None and self._sendable(self._first_block) == self._first_block:
            if self._source.first is not None:
                break
            await asyncio.wait((self._source.changed(), self._given_up), return_when=asyncio.FIRST_COMPLETED)
        self._check()

    def _sendable(self, first: int) -> int:
        """The end of the blocks from `first` on that may leave now; `first` when that is less than a chunk."""
        if self._source.first is not None:
            return len(self._lengths)
        ready = self._source.ready // self._storage.block_size
        return ready if ready - first >= self._chunk_blocks else first

    async def _queue(self, pool: KvPool) -> KvChannel:
        self._queueing = asyncio.ensure_future(pool.acquire())
        try:
            return await self._queueing
        except asyncio.CancelledError:
            self._check()
            raise
        finally:
            self._queueing = None

    async def _send(self, channel: KvChannel, queue_ns: int, pool: KvPool) -> Delivered:
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
                attempt=self._attempt,
                encoding=None if self._encoding is None else self._encoding.name,
            )
            await connection.send(begin)
            await self._send_blocks(connection, answer, pool)
            if self._aborted is None and not answer.done():
                first = self._source.first
                assert first is not None
                end = KvEnd(
                    transfer=self.transfer,
                    first_token=first.token,
                    finish_reason=first.finish_reason,
                    first_logprob=first.logprob,
                )
                await connection.send(end)
                await connection.drained(answer)
            else:
                await connection.send(KvAbort(transfer=self.transfer, reason=self._aborted or "refused"))
            received = await answer
        finally:
            self._batch = None
            channel.forget(self.transfer)
        if isinstance(received, KvRefused):
            raise TransferRefused(received)
        return Delivered(queue_ns, start_ns, received.received_ns, self.kv_bytes, self._chunks, self._waited_ns)

    async def _send_blocks(
        self, connection: Connection, answer: "asyncio.Future[KvReceived | KvRefused]", pool: KvPool
    ) -> None:
        """Everything as it becomes final; returns early when the transfer is given up on either side."""
        first = self._first_block
        while True:
            computing = self._source.first is None
            end = self._sendable(first)
            for message, views in self._frames(first, end):
                if self._aborted is not None or answer.done():
                    return
                self._batch, kind, size = connection.batch(message, views)
                del views
                await connection.send_batch(self._batch, kind, size)
                self._batch = None
                await asyncio.sleep(0)  # a fast peer must not keep the loop from other requests
            self._chunks += computing and end > first
            first = end
            if not computing:
                return
            if end == self._sendable(end) and self._source.first is None:
                waiting_ns = time.monotonic_ns()
                while await self._nothing_new(answer, pool.keep_alive_s):
                    await connection.send(Padding())
                self._waited_ns += time.monotonic_ns() - waiting_ns
            if answer.done():
                return

    async def _nothing_new(self, answer: "asyncio.Future[KvReceived | KvRefused]", timeout_s: float) -> bool:
        """Wait for more KV or an early end of the transfer; whether neither came in time."""
        waited_for: set[asyncio.Future[Any]] = {self._source.changed(), answer}
        done, _ = await asyncio.wait(waited_for, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return not done

    def _check(self) -> None:
        if self._aborted is not None:
            raise TransferAborted(self._aborted)

    def _frames(self, first: int, end: int) -> Iterator[tuple[KvBlocks, list[memoryview]]]:
        while first < end:
            views: list[memoryview] = []
            size = 0
            while first + len(views) < end and (size < FRAME_BODY_BYTES or not views):
                index = first + len(views)
                view = self._storage.view(self._blocks[index], self._lengths[index])
                views.append(view if self._encoding is None else self._encoding.encode(view))
                size += len(views[-1])
            message = KvBlocks(
                transfer=self.transfer,
                first_block=first,
                tokens=self._lengths[first : first + len(views)],
                checksums=[xxhash.xxh3_64_intdigest(view) for view in views],
            )
            yield message, views
            first += len(views)
