"""The radix cache of KV blocks: what is matched, kept and evicted. Used by P, RLD and MD alike; knows no roles."""

from workers.cache.hashing import chain_root, extend_chain
from workers.cache.mirror import CacheMirror
from workers.cache.policy import ExtentPath, PrefixPolicy
from workers.cache.store import BlockCache, MissingBlocks

__all__ = ["BlockCache", "CacheMirror", "ExtentPath", "MissingBlocks", "PrefixPolicy", "chain_root", "extend_chain"]
