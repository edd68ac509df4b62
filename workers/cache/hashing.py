"""Chained block hashes: a block's name, which tells all tokens up to the block's end. Pure.

hash(block i) = xxh3-128(hash(block i-1) + token ids of block i), and the root is a hash of the block size and the
model's fingerprint. Equal hashes mean equal prefixes, so that of two chains the common part can be found by bisection.
xxh3 is no cryptographic hash: whoever may choose prompts *and* shares a cache with others could forge a collision.
"""

from array import array
from collections.abc import Hashable, Sequence

import xxhash

HASH_BYTES = 16
TOKEN_BYTES = 4


def chain_root(fingerprint: str, block_size: int) -> bytes:
    """What the first block's hash continues."""
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
    """How many blocks two chains have in common. By bisection: equal names have equal ones before them."""
    low, high = 0, min(len(some), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if some[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
