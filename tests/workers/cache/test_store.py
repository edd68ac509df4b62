"""The live cache: what is matched to the token, what is copied, and what is never evicted."""

import random
import time

import pytest
import torch

from workers.cache import BlockCache, CacheMirror, MissingBlocks, chain_root, extend_chain
from workers.engine import BlockPool, OutOfBlocks
from workers.models.load import TINY


class Shelf:
    """A cache over a small pool whose blocks' content tells their tokens."""

    def __init__(self, num_blocks: int = 16, size: int = 4) -> None:
        self.pool = BlockPool(TINY, num_blocks, size)
        self.cache = BlockCache(self.pool, "model")

    def serve(self, tokens: list[int], computed: int | None = None, others: tuple[list[int], ...] = ()) -> int:
        """A sequence's whole life; returns how many tokens it found."""
        lease, blocks, found = self.cache.adopt(tokens)
        computed = len(tokens) if computed is None else computed
        self.check(tokens[:found], blocks)
        slots = self.pool.storage[blocks].flatten(0, 1)
        for index in range(found, computed):
            slots[index] = float(tokens[index])
        self.pool.storage[blocks] = slots.view(len(blocks), self.pool.block_size, *slots.shape[1:])
        self.cache.keep(lease, tokens[:computed], blocks, last=True)
        self.cache.end(lease)
        self.pool.release(blocks)
        self.pool.check_integrity([self.cache.blocks, *others])
        self.cache.check_integrity()
        return found

    def check(self, tokens: list[int], blocks: list[int]) -> None:
        content = self.pool.storage[blocks].flatten(0, 1)[: len(tokens), 0, 0, 0, 0].tolist()
        assert content == [float(token) for token in tokens], "the KV found is that of these tokens"


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (list(range(10)), 9),  # all but the last token, which is computed for its logits
        (list(range(8)), 7),  # an exact multiple: the last block is copied
        (list(range(11)), 10),  # two shared blocks and the unfilled third
        ([*range(10), 99], 10),
        ([*range(9), 99, 98], 9),  # the unfilled block in part
        ([*range(6), 99, 98, 97], 6),  # a full block in part
        ([0], 0),
        ([0, 99], 1),
        ([99, *range(10)], 0),
    ],
)
def test_the_longest_cached_beginning_is_found_to_the_token(second: list[int], found: int) -> None:
    shelf = Shelf()
    assert shelf.serve(list(range(10))) == 0
    assert shelf.serve(second) == found
    assert shelf.serve(list(range(10))) == 9, "and nobody has written into what is shared"


def test_what_was_not_computed_is_not_kept() -> None:
    shelf = Shelf()
    shelf.serve(list(range(10)), computed=6)
    assert shelf.serve(list(range(10))) == 6


def test_an_unfilled_last_block_is_kept_once() -> None:
    shelf = Shelf()
    for _ in range(5):
        shelf.serve([1, 2, 3, 4, 5, 6])
    assert len(shelf.cache) == 2


def test_room_is_made_before_a_sequence_is_refused_and_what_is_in_use_stays() -> None:
    shelf = Shelf(num_blocks=8)
    shelf.serve(list(range(100, 116)))
    lease, blocks, found = shelf.cache.adopt(list(range(100, 113)))
    assert found == 12
    with pytest.raises(OutOfBlocks):
        shelf.cache.adopt(list(range(200, 220)))
    assert len(shelf.cache) == 4, "a request that cannot be served evicts nothing"
    assert shelf.serve(list(range(200, 213)), others=(blocks,)) == 0
    shelf.check(list(range(100, 112)), blocks)
    shelf.cache.end(lease)
    shelf.pool.release(blocks)
    assert shelf.serve(list(range(100, 113))) == 12


def test_when_only_the_block_to_copy_can_make_room_it_does() -> None:
    shelf = Shelf(num_blocks=3)
    shelf.serve(list(range(12)))
    assert shelf.serve(list(range(12))) == 8
    shelf.check(list(range(8)), [shelf.cache._cached[name].block for name in shelf.cache.hashes(list(range(8)))])


def test_a_writer_gets_exactly_the_blocks_it_relies_on() -> None:
    shelf = Shelf()
    tokens = list(range(16))
    shelf.serve(tokens)
    with pytest.raises(MissingBlocks) as missing:
        shelf.cache.adopt([*tokens, 1, 2, 3, 4], 5)
    assert missing.value.held == 4
    lease, blocks, found = shelf.cache.adopt(tokens, 2)
    assert found == 8
    assert not set(blocks[2:]) & set(shelf.cache.blocks), "what will be written is nobody else's"
    shelf.cache.end(lease)
    shelf.pool.release(blocks)
    lease, blocks, found = shelf.cache.adopt(tokens, 4)
    assert found == 16, "an empty delta"
    shelf.cache.end(lease)
    shelf.pool.release(blocks)


def test_another_model_or_block_size_has_other_names() -> None:
    tokens = list(range(64))
    chains = {tuple(extend_chain(chain_root(model, 4), [], tokens, 4)) for model in ("a", "b")}
    assert len(chains) == 2
    assert chain_root("a", 4) != chain_root("a", 8)


def test_a_chain_grown_piece_by_piece_is_the_chain() -> None:
    tokens = [random.Random(1).randrange(50_000) for _ in range(1003)]
    root = chain_root("m", 16)
    grown: list[bytes] = []
    for end in (0, 5, 16, 17, 400, 1003):
        extend_chain(root, grown, tokens[:end], 16)
    assert grown == extend_chain(root, [], tokens, 16)
    assert len(set(grown)) == 62


def test_a_hundred_thousand_tokens_are_matched_in_under_five_milliseconds() -> None:
    pool = BlockPool(TINY, 7000, 16)
    cache = BlockCache(pool, "model")
    tokens = [random.Random(2).randrange(50_000) for _ in range(100_000)]
    lease, blocks, _ = cache.adopt(tokens)
    cache.keep(lease, tokens, blocks)
    best = 1.0
    for _ in range(10):
        start = time.process_time()
        hashes = cache.hashes(tokens)
        held = cache.policy.match(hashes)
        best = min(best, time.process_time() - start)
        assert held == 6250
    assert best < 5e-3, f"{best * 1e3:.2f} ms"


def test_a_mirror_follows_notices_and_says_how_much_of_a_chain_is_there() -> None:
    chain = extend_chain(chain_root("m", 4), [], list(range(40)), 4)
    mirror = CacheMirror()
    assert mirror.held(chain) == 0
    mirror.apply(chain[:6], [])
    assert [mirror.held(chain[:count]) for count in (0, 3, 6, 10)] == [0, 3, 6, 6]
    mirror.apply([], chain[5:3:-1])
    assert mirror.held(chain) == 4
    mirror.correct(chain, 1)
    assert mirror.held(chain) == 1
    mirror.apply(chain[:2], [], reset=True)
    assert (mirror.held(chain), len(mirror)) == (2, 2)


def test_every_block_is_copied_byte_by_byte() -> None:
    shelf = Shelf()
    tokens = list(range(8))
    lease, blocks, _ = shelf.cache.adopt(tokens)
    shelf.pool.storage[blocks] = torch.randn(shelf.pool.storage[blocks].shape)
    shelf.cache.keep(lease, tokens, blocks)
    other, copies, found = shelf.cache.adopt(tokens)
    assert (found, copies[0]) == (7, blocks[0])
    assert copies[1] != blocks[1]
    assert torch.equal(shelf.pool.storage[copies[1], :3], shelf.pool.storage[blocks[1], :3])
    for ended, held in ((lease, blocks), (other, copies)):
        shelf.cache.end(ended)
        shelf.pool.release(held)
