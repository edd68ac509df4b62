"""The blocks of a runner's sequences: from the cache or the pool, back again, and who yields when they run out.

Owns leases and preemption, no tensors and no clock. A prompt gets its blocks, and what the cache holds of it by then,
when its turn to be computed comes; if one before it is computing a longer beginning of it, it waits for that. When a
decoding sequence needs a block and none is left, the youngest of them gives up all that it has: its KV stays in the
cache as long as nobody needs the room, and it goes on, from there or from its first token, when there is room again.
So the older ones finish, and nobody fails who could wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workers.cache.hashing import common_blocks
from workers.engine.blocks import BlockPool, OutOfBlocks
from workers.engine.engine import Chunk, Engine
from workers.engine.sequence import Sequence

if TYPE_CHECKING:
    from workers.cache import BlockCache
    from workers.cache.store import Lease


@dataclass
class Fitted:
    """What can be computed now, and of the others which wait and why, and which fail."""

    ready: list[Chunk] = field(default_factory=list)
    opened: list[Sequence] = field(default_factory=list)
    """Of these, who has just got blocks, and what the cache had."""
    waiting: list[tuple[Sequence, OutOfBlocks]] = field(default_factory=list)
    """For room."""
    behind: list[Sequence] = field(default_factory=list)
    """For the beginning that another one is computing."""
    refused: list[tuple[Sequence, Exception]] = field(default_factory=list)


class SequenceMemory:
    """Blocks of the sequences of one engine. `leases`: what each uses of the cache, when there is one."""

    def __init__(self, engine: Engine, pool: BlockPool, cache: BlockCache | None) -> None:
        self.leases: dict[Sequence, Lease] = {}
        self._engine = engine
        self._pool = pool
        self._cache = cache
        self._open: set[Sequence] = set()

    def open(self, sequence: Sequence, cached_blocks: int | None = None) -> None:
        """Blocks for all tokens of a new sequence, of a cache the longest beginning it has (`BlockCache.adopt`).

        Raises OutOfBlocks, MissingBlocks, ContextTooLong or ValueError, with nothing allocated.
        """
        self._engine.check(sequence)
        self._adopt(sequence, cached_blocks)
        self._admit(sequence)

    def expect(self, sequence: Sequence) -> None:
        """A new sequence, which gets its blocks when it is to be computed.

        Raises ContextTooLong or ValueError, and OutOfBlocks when the whole pool is too small for it.
        """
        self._engine.check(sequence)
        needed = self._pool.blocks_for(len(sequence.tokens))
        if needed > self._pool.num_blocks:
            raise OutOfBlocks(
                f"{needed} KV blocks of {self._pool.block_size} tokens needed, and there are "
                f"{self._pool.num_blocks} in all; shorten the prompt or give the worker a larger KV budget"
            )
        if self._cache is not None:
            self.leases[sequence] = self._cache.lease(sequence.tokens)
        self._admit(sequence)

    def _admit(self, sequence: Sequence) -> None:
        self._engine.begin(sequence)
        self._open.add(sequence)

    def _adopt(self, sequence: Sequence, cached_blocks: int | None = None) -> None:
        if self._cache is None:
            sequence.blocks = self._pool.allocate(self._pool.blocks_for(len(sequence.tokens)))
        else:
            known = self.leases.get(sequence)
            lease, sequence.blocks, sequence.computed = self._cache.adopt(sequence.tokens, cached_blocks, known)
            self.leases[sequence] = lease
            if not sequence.preempted:
                sequence.cached = sequence.computed

    def forget(self, sequence: Sequence, length: int) -> None:
        """Take back the tokens from position `length` on; blocks that the cache has of them are left to it."""
        sequence.forget(length)
        lease = self.leases.get(sequence)
        if lease is None:
            return
        full = length // self._pool.block_size
        if lease.pinned > full:
            self._yield_up(sequence)
        del lease.hashes[full:]

    def keep(self, sequence: Sequence) -> None:
        """Put the full blocks computed so far into the cache."""
        if self._cache is not None and sequence in self._open:
            self._cache.keep(self.leases[sequence], sequence.tokens[: sequence.computed], sequence.blocks)

    def close(self, sequence: Sequence) -> None:
        """Give everything back; what was computed stays in the cache, unless the sequence has failed."""
        self._open.remove(sequence)
        self._give_back(sequence)
        self.leases.pop(sequence, None)

    def fit(self, chunks: Iterable[Chunk], computing: List[Sequence], yielding: List[Sequence]) -> Fitted:
        """Blocks for what the next step is to compute. `chunks`, all that are `computing`, and of these the ones that
        can yield have the oldest first.
        """
        fitted = Fitted()
        for chunk in chunks:
            sequence = chunk.sequence
            try:
                if sequence.blocks:
                    for victim in self._grow(chunk, yielding):
                        fitted.ready = [other for other in fitted.ready if other.sequence is not victim]
                elif (
                    fitted.waiting
                ):  # first come, first served: a small one must not keep taking the room of a large one
                    fitted.waiting.append((sequence, fitted.waiting[0][1]))
                    continue
                elif self._is_behind(sequence, computing):
                    fitted.behind.append(sequence)
                    continue
                else:
                    chunk = self._resumed(chunk, sum(bool(other.blocks) for other in yielding))
                    fitted.opened.append(sequence)
            except OutOfBlocks as error:
                self._refuse(sequence, error, yielding, fitted)
            except Exception as error:
                fitted.refused.append((sequence, error))
            else:
                fitted.ready.append(chunk)
        return fitted

    def _is_behind(self, sequence: Sequence, computing: List[Sequence]) -> bool:
        """True if one that is being computed will soon have put more of its beginning into the cache than there is."""
        if self._cache is None or sequence.preempted:
            return False
        hashes = self.leases[sequence].hashes
        older = itertools.takewhile(lambda other: other is not sequence, computing)
        ahead = [other for other in older if other.blocks and other.computed < other.prompt_len]
        common = max((common_blocks(self.leases[other].hashes, hashes) for other in ahead), default=0)
        return common > self._cache.policy.match(hashes)

    def _refuse(self, sequence: Sequence, error: OutOfBlocks, yielding: List[Sequence], fitted: Fitted) -> None:
        """There is no room for a sequence: it waits as long as anybody else has blocks, all of whom give them back."""
        if not any(other.blocks for other in self._open if other is not sequence):
            fitted.refused.append((sequence, error))
            return
        fitted.waiting.append((sequence, error))
        if sequence.blocks and sequence in yielding and any(o.blocks for o in yielding if o is not sequence):
            self._yield_up(sequence)

    def _grow(self, chunk: Chunk, yielding: List[Sequence]) -> list[Sequence]:
        """Allocate what the chunk lacks; returns who yielded for it. Raises OutOfBlocks when no younger one is left."""
        sequence = chunk.sequence
        victims: list[Sequence] = []
        while True:
            try:
                self._engine.grow(sequence, chunk.count)
                return victims
            except OutOfBlocks:
                youngest = next((other for other in reversed(yielding) if other.blocks), sequence)
                if youngest is sequence:
                    raise
                self._yield_up(youngest)
                victims.append(youngest)

    def _resumed(self, chunk: Chunk, running: int) -> Chunk:
        """The chunk of a sequence that has no blocks, after giving it some for all of its tokens. Raises OutOfBlocks.

        Each of the `running` ones has a block to spare then: else the next to grow would take these away again.
        """
        sequence = chunk.sequence
        needed = self._pool.blocks_for(len(sequence.tokens))
        if self._cache is not None:
            needed -= self._cache.policy.match_pinned(self.leases[sequence].hashes)
        available = self._pool.free_count + (self._cache.policy.evictable if self._cache is not None else 0)
        if needed + running > available:
            raise OutOfBlocks(f"{needed} KV blocks needed, {available} of {self._pool.num_blocks} free")
        self._adopt(sequence)
        return Chunk(sequence, min(chunk.count, sequence.pending))

    def _yield_up(self, sequence: Sequence) -> None:
        """Give the blocks back. The tokens stay, their KV is to be computed again."""
        self._give_back(sequence)
        sequence.computed = 0
        sequence.preempted += 1

    def _give_back(self, sequence: Sequence) -> None:
        if self._cache is not None:
            lease = self.leases[sequence]
            if not sequence.spoilt and sequence.blocks:
                self._cache.keep(lease, sequence.tokens[: sequence.computed], sequence.blocks, last=True)
            self._cache.end(lease)
        self._pool.release(sequence.blocks)
        sequence.blocks = []
