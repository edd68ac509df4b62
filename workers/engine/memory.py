"""The blocks of a runner's sequences: from the cache or the pool, back again, and who yields when they run out.

Owns leases and preemption, no tensors and no clock. When a decoding sequence needs a block and none is left, the
youngest of them gives up all that it has: its KV stays in the cache as long as nobody needs the room, and it goes on,
from there or from its first token, when there is room again. So the older ones finish, and nobody fails who could wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workers.engine.blocks import BlockPool, OutOfBlocks
from workers.engine.engine import Chunk, Engine
from workers.engine.sequence import Sequence

if TYPE_CHECKING:
    from workers.cache import BlockCache
    from workers.cache.store import Lease


@dataclass
class Fitted:
    """What can be computed now, which sequences wait for room, and which get none; each of these with why."""

    ready: list[Chunk] = field(default_factory=list)
    waiting: list[tuple[Sequence, OutOfBlocks]] = field(default_factory=list)
    refused: list[tuple[Sequence, OutOfBlocks]] = field(default_factory=list)


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
        if self._cache is None:
            self._engine.admit(sequence)
        else:
            self._engine.check(sequence)
            self.leases[sequence], sequence.blocks, sequence.cached = self._cache.adopt(sequence.tokens, cached_blocks)
            sequence.computed = sequence.cached
            self._engine.begin(sequence)
        self._open.add(sequence)

    def keep(self, sequence: Sequence) -> None:
        """Put the full blocks computed so far into the cache."""
        if self._cache is not None and sequence in self._open:
            self._cache.keep(self.leases[sequence], sequence.tokens[: sequence.computed], sequence.blocks)

    def close(self, sequence: Sequence) -> None:
        """Give everything back; what was computed stays in the cache."""
        self._open.remove(sequence)
        self._give_back(sequence)
        self.leases.pop(sequence, None)

    def fit(self, chunks: Iterable[Chunk], decoding: List[Sequence]) -> Fitted:
        """Blocks for what the next step is to compute. `chunks` and `decoding`, the sequences that can yield, have the
        oldest first.
        """
        fitted = Fitted()
        for chunk in chunks:
            sequence = chunk.sequence
            try:
                if not sequence.blocks:
                    chunk = self._resumed(chunk, sum(bool(other.blocks) for other in decoding))
                else:
                    for victim in self._grow(chunk, decoding):
                        fitted.ready = [other for other in fitted.ready if other.sequence is not victim]
            except OutOfBlocks as error:
                self._refuse(sequence, error, decoding, fitted)
            else:
                fitted.ready.append(chunk)
        return fitted

    def _refuse(self, sequence: Sequence, error: OutOfBlocks, decoding: List[Sequence], fitted: Fitted) -> None:
        """There is no room for a sequence: it waits, if it can and if there is something to wait for."""
        if sequence not in decoding or not any(other.blocks for other in self._open if other is not sequence):
            fitted.refused.append((sequence, error))
            return
        fitted.waiting.append((sequence, error))
        if sequence.blocks and any(other.blocks for other in decoding if other is not sequence):
            self._yield_up(sequence)

    def _grow(self, chunk: Chunk, decoding: List[Sequence]) -> list[Sequence]:
        """Allocate what the chunk lacks; returns who yielded for it. Raises OutOfBlocks when no younger one is left."""
        sequence = chunk.sequence
        victims: list[Sequence] = []
        while True:
            try:
                self._engine.grow(sequence, chunk.count)
                return victims
            except OutOfBlocks:
                youngest = next((other for other in reversed(decoding) if other.blocks), sequence)
                if youngest is sequence:
                    raise
                self._yield_up(youngest)
                victims.append(youngest)

    def _resumed(self, chunk: Chunk, running: int) -> Chunk:
        """The chunk of a sequence that has yielded, after giving it blocks for all of its tokens. Raises OutOfBlocks.

        Each of the `running` ones has a block to spare then: else the next to grow would take these away again.
        """
        sequence = chunk.sequence
        needed = self._pool.blocks_for(len(sequence.tokens))
        available = self._pool.free_count + (self._cache.policy.evictable if self._cache is not None else 0)
        if needed + running > available:
            raise OutOfBlocks(f"{needed} KV blocks needed to go on, {available} of {self._pool.num_blocks} free")
        if self._cache is None:
            sequence.blocks = self._pool.allocate(needed)
        else:
            self.leases[sequence], sequence.blocks, sequence.computed = self._cache.adopt(sequence.tokens)
        return Chunk(sequence, min(chunk.count, sequence.pending))

    def _yield_up(self, sequence: Sequence) -> None:
        """Give the blocks back. The tokens stay, their KV is to be computed again."""
        self._give_back(sequence)
        sequence.computed = 0
        sequence.preempted += 1

    def _give_back(self, sequence: Sequence) -> None:
        if self._cache is not None:
            lease = self.leases[sequence]
            self._cache.keep(lease, sequence.tokens[: sequence.computed], sequence.blocks, last=True)
            self._cache.end(lease)
        self._pool.release(sequence.blocks)
        sequence.blocks = []
