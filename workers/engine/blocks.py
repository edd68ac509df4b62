"""Paged KV memory: fixed-size blocks of tokens with reference counts. Owns the memory, not what it means.

One tensor `[num_blocks, block_size, *kv_shape]`, token-major: the KV of the first n tokens of a block is
one contiguous run of bytes, which the wire sends and receives in place. Not thread-safe: allocation belongs
to one thread (the event loop's); the compute thread only reads and writes the tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import torch

from workers.engine.staging import HostStage, needs_staging
from workers.models.config import ModelConfig
from workers.models.weights import DTYPES


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for. Nothing has been allocated."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens for one model. `bytes_per_token` counts all layers."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, block_size, *config.kv_shape)
        element = DTYPES[dtype]
        self.bytes_per_token = int(np.prod(config.kv_shape)) * element.itemsize
        self.stage: HostStage | None = None
        """The memory in which the wire finds the blocks of a pool whose memory it cannot reach."""
        if device == "cpu":
            # numpy asks the kernel for zero pages: a large pool costs memory only once it is written to.
            array = np.zeros(num_blocks * block_size * self.bytes_per_token, np.uint8)
            self._bytes = array.data
            self.storage = torch.from_numpy(array).view(element).view(shape)
        else:
            self.storage = torch.zeros(shape, dtype=element, device=device)
        if needs_staging(self.storage.device):
            self.stage = HostStage(self.storage)
            self._bytes = self.stage.bytes
        tokens = self.storage.flatten(0, 1)
        self.layers = [tokens[:, layer] for layer in range(config.layers)]
        """Per layer a view `[num_blocks * block_size, *kv_shape[1:]]`, indexed by slot."""
        self._references = [0] * num_blocks  # 0: free; the sum is what all holders together hold
        self._free = deque(range(num_blocks))
        self.reclaim: Callable[[int], None] | None = None
        """Asked to release so many blocks when `allocate` would fail: a cache's chance to make room."""

    @classmethod
    def for_budget(
        cls,
        config: ModelConfig,
        budget_bytes: int,
        block_size: int = 16,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> BlockPool:
        """The largest pool within `budget_bytes`. Raises ValueError when that is not even one block."""
        block_bytes = int(np.prod(config.kv_shape)) * DTYPES[dtype].itemsize * block_size
        if budget_bytes < block_bytes:
            raise ValueError(
                f'KV budget of {budget_bytes} bytes is below one block of model "{config.name}" '
                f"({block_bytes} bytes); raise the budget"
            )
        return cls(config, budget_bytes // block_bytes, block_size, dtype, device)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill: none too many at an exact multiple."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, each with one reference. Raises OutOfBlocks, taking none, when too few are
        free.
        """
        if count > len(self._free) and self.reclaim is not None:
            self.reclaim(count - len(self._free))
        if count > len(self._free):
            raise OutOfBlocks(
                f"{count} KV blocks of {self.block_size} tokens needed, {len(self._free)} of "
                f"{self.num_blocks} free; retry later or give the worker a larger KV budget"
            )
        ids = [self._free.popleft() for _ in range(count)]
        for block in ids:
            self._references[block] = 1
        return ids

    def retain(self, ids: Iterable[int]) -> None:
        """Adds one reference to each block: it stays as long as anyone holds it."""
        ids = self._in_use(ids)
        for block in ids:
            self._references[block] += 1

    def release(self, ids: Iterable[int]) -> None:
        """Gives back one reference to each block; those without any are free again."""
        ids = self._in_use(ids)
        for block in ids:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
            assert self._references[block] >= 0, f"block {block} released twice"

    def references(self, block: int) -> int:
        """Number of holders of the block; 0 when it is free."""
        return self._references[block]

    def view(self, block: int, num_tokens: int) -> memoryview:
        """Bytes of the KV of the block's first `num_tokens` tokens. Writable on a CPU, without a copy; of a pool on a
        device a copy, which counts only when it is `store`d.
        """
        room = self.room(block, num_tokens)
        if self.stage is not None:
            self.stage.fetch([block])
        return room

    def room(self, block: int, num_tokens: int) -> memoryview:
        """As `view`, for someone who writes all of it and does not care what was there; then `store` the block."""
        if not 0 <= num_tokens <= self.block_size:
            raise ValueError(f"{num_tokens} tokens do not fit a block of {self.block_size}")
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} does not exist; the pool has {self.num_blocks}")
        start = block * self.block_size * self.bytes_per_token
        return self._bytes[start : start + num_tokens * self.bytes_per_token]

    def store(self, blocks: Iterable[int]) -> int:
        """Take what was written into the blocks' views for their KV from now on; returns the ns of copies."""
        return self.stage.store(blocks) if self.stage is not None else 0

    def check_integrity(self, holders: Iterable[Iterable[int]] | None = None) -> None:
        """Asserts that every block is either free or referenced.

        With `holders` (the block lists of everyone who holds references) the counts must match exactly.
        """
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        held_free = [block for block in self._free if self._references[block]]
        assert not held_free, f"blocks {held_free} are free and referenced"
        lost = self._references.count(0) - len(self._free)
        assert not lost, f"{lost} blocks are neither free nor referenced"
        if holders is not None:
            held = [0] * self.num_blocks
            for block in (block for ids in holders for block in ids):
                held[block] += 1
            assert held == self._references, "references do not match what the holders hold"

    def _in_use(self, ids: Iterable[int]) -> list[int]:
        ids = list(ids)
        for block in ids:
            assert self._references[block] > 0, f"block {block} is not in use"
        return ids
