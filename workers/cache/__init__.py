"""The radix cache of KV blocks: what is matched, kept and evicted. Used by P, RLD and MD alike; knows no roles."""

from typing import TYPE_CHECKING, Any

from workers.cache.hashing import CacheMirror, chain_root, common_blocks, extend_chain
from workers.cache.policy import ExtentPath, PrefixPolicy

if TYPE_CHECKING:
    from workers.cache.store import BlockCache, MissingBlocks

__all__ = [
    "BlockCache",
    "CacheMirror",
    "ExtentPath",
    "MissingBlocks",
    "PrefixPolicy",
    "chain_root",
    "common_blocks",
    "extend_chain",
]


def __getattr__(name: str) -> Any:
    """The block store imports torch, which takes seconds: traces and the simulator need the policy only."""
    if name in ("BlockCache", "MissingBlocks"):
        from workers.cache import store

        return getattr(store, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
