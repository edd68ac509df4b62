"""The block pool: counts, memory layout, and what it refuses."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from workers.engine import BlockPool, OutOfBlocks
from workers.models.load import TINY

BYTES_PER_TOKEN = 4 * 2 * 2 * 32 * 4  # layers, key and value, KV heads, head size, float32


class PoolMachine(RuleBasedStateMachine):
    """Random holders take, share and give back blocks; the pool's books must agree with theirs at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TINY, num_blocks=12, block_size=2)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, 14))
    def allocate(self, count: int) -> None:
        free = self.pool.free_count
        if count > free:
            with pytest.raises(OutOfBlocks, match=f"{count} KV blocks"):
                self.pool.allocate(count)
            assert self.pool.free_count == free
            return
        ids = self.pool.allocate(count)
        assert len(set(ids)) == count
        taken = {block for holder in self.holders for block in holder}
        assert not taken & set(ids)
        self.holders.append(ids)

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        if self.holders:
            holder = data.draw(st.sampled_from(self.holders))
            self.pool.retain(holder)
            self.holders.append(list(holder))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.holders:
            index = data.draw(st.integers(0, len(self.holders) - 1))
            self.pool.release(self.holders.pop(index))

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity(self.holders)
        held = {block for holder in self.holders for block in holder}
        assert self.pool.free_count == self.pool.num_blocks - len(held)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_the_first_tokens_of_a_block_are_a_contiguous_prefix_of_its_bytes() -> None:
    pool = BlockPool(TINY, num_blocks=3, block_size=4)
    assert pool.bytes_per_token == BYTES_PER_TOKEN
    pool.storage.copy_(torch.randn(pool.storage.shape))
    for tokens in range(5):
        expected = pool.storage[1, :tokens].numpy().tobytes()
        assert bytes(pool.view(1, tokens)) == expected


def test_a_view_writes_through_to_the_tensor() -> None:
    pool = BlockPool(TINY, num_blocks=2, block_size=4)
    values = np.arange(2 * BYTES_PER_TOKEN // 4, dtype=np.float32)
    pool.view(1, 2)[:] = values.tobytes()
    assert torch.equal(pool.storage[1, :2].flatten(), torch.from_numpy(values))
    assert not pool.storage[0].any()
    assert not pool.storage[1, 2:].any()


@pytest.mark.parametrize(("block", "tokens"), [(0, 5), (0, -1), (2, 1), (-1, 1)])
def test_a_view_outside_the_pool_is_refused(block: int, tokens: int) -> None:
    with pytest.raises(ValueError, match=r"do not fit|does not exist"):
        BlockPool(TINY, num_blocks=2, block_size=4).view(block, tokens)


def test_releasing_a_free_block_is_caught_and_changes_nothing() -> None:
    pool = BlockPool(TINY, num_blocks=2)
    ids = pool.allocate(1)
    pool.release(ids)
    with pytest.raises(AssertionError, match="not in use"):
        pool.release(ids)
    with pytest.raises(AssertionError, match="not in use"):
        pool.retain(ids)
    pool.check_integrity([])


def test_a_budget_buys_whole_blocks_and_less_than_one_is_refused() -> None:
    block = 16 * BYTES_PER_TOKEN
    assert BlockPool.for_budget(TINY, 5 * block + block - 1).num_blocks == 5
    with pytest.raises(ValueError, match="below one block"):
        BlockPool.for_budget(TINY, block - 1)


def test_half_precision_halves_the_bytes() -> None:
    assert BlockPool(TINY, num_blocks=2, dtype="bfloat16").bytes_per_token == BYTES_PER_TOKEN // 2
