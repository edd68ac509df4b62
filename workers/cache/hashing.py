"""Chained block hashes, and the mirror of another worker's cache that is made of them. Pure.

A block's name tells all tokens up to the block's end: hash(block i) = xxh3-128(hash(block i-1) + token ids of block i),
and the root is a hash of the block size and the model's fingerprint. Equal hashes mean equal prefixes, so that of two
chains the common part can be found by bisection. xxh3 is no cryptographic hash: whoever may choose prompts *and* shares
a cache with others could forge a collision.
"""

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence

import xxhash

HASH_BYTES = 16
TOKEN_BYTES = 4


def chain_root(fingerprint: str, block_size: int) -> bytes:
    """The root, which the first block's hash continues."""
    return xxhash.xxh3_128_digest(f"{block_size} tokens a block of {fingerprint}".encode())


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Ids as unsigned integers of TOKEN_BYTES each."""
    return array("I", tokens).tobytes()


def block_hash(parent: bytes, block: bytes) -> bytes:
    """Name of the block of the ids `block` (`token_bytes`) that follows the block named `parent`."""
    return xxhash.xxh3_128_digest(parent + block)


def extend_chain(root: bytes, hashes: list[bytes], tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Appends to `hashes`, those of the first blocks of `tokens`, what its other full blocks have; returns it."""
    done = len(hashes)
    full = len(tokens) // block_size
    if full > done:
        data = token_bytes(tokens[done * block_size : full * block_size])
        step = block_size * TOKEN_BYTES
        digest = xxhash.xxh3_128_digest
        parent = hashes[-1] if hashes else root
        for start in range(0, len(data), step):
            parent = digest(parent + data[start : start + step])
            hashes.append(parent)
    return hashes


def common_blocks(some: Sequence[Hashable], others: Sequence[Hashable]) -> int:
    """Number of blocks that two chains have in common. By bisection: equal names have equal ones before them."""
    return bisect_left(range(min(len(some), len(others))), True, key=lambda block: some[block] != others[block])


class CacheMirror:
    """The names of another worker's cached full blocks, as far as its `CacheNotice`s have told, which are taken in the
    order they were sent. It may be wrong, so its users verify.
    """

    def __init__(self) -> None:
        self._names: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._names)

    def apply(self, inserted: Iterable[bytes], evicted: Iterable[bytes], *, reset: bool = False) -> None:
        """Take one notice: first what went, then what came. `reset`: forget everything before."""
        if reset:
            self._names.clear()
        self._names.difference_update(evicted)
        self._names.update(inserted)

    def held(self, hashes: Sequence[bytes]) -> int:
        """Number of a chain's first blocks that are there. By bisection: no cache holds a block without its parents."""
        return bisect_left(hashes, True, key=lambda name: name not in self._names)

    def correct(self, hashes: Sequence[bytes], held: int) -> None:
        """The worker itself says that it holds only the first `held` blocks of a chain."""
        self._names.difference_update(hashes[held:])
