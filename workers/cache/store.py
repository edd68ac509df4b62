"""The radix cache over a block pool: which block holds the KV of which prefix. Decides nothing itself: see `policy`.

Matched for a sequence of n tokens: all cached full blocks from its beginning, *shared* by reference count, and then
the first tokens of one further cached block (a full one, or the unfilled last block of an earlier sequence), *copied*,
because the sequence will write behind them. Never more than n - 1 tokens: the last one is computed for its logits.

Like the pool's books it belongs to the event loop's thread.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from workers.cache.hashing import TOKEN_BYTES, block_hash, chain_root, extend_chain, token_bytes
from workers.cache.policy import PrefixPolicy
from workers.engine.blocks import BlockPool, OutOfBlocks

BRANCHES = 32  # how many blocks that continue a prefix are compared with a prompt; the newest ones


class MissingBlocks(Exception):
    """Fewer blocks are cached than were said to be: `held`."""

    def __init__(self, wanted: int, held: int) -> None:
        super().__init__(f"{wanted} cached blocks of the prompt were relied on, {held} are there")
        self.held = held


@dataclass(frozen=True)
class _Cached:
    block: int
    tokens: bytes  # ids of the tokens whose KV is in the block: fewer than the block has room for in a last one


@dataclass(eq=False)
class Lease:
    """A sequence's hold on the cache: `pinned` blocks of the path `hashes`. Its block references are its own."""

    hashes: list[bytes] = field(default_factory=list)
    pinned: int = 0


class BlockCache:
    """Keeps one reference to each cached block, and gives the pool blocks back when it runs out.

    `on_change(inserted, evicted)` hears of full blocks by name, in order. `keeps_unfilled`: last blocks, too; of no use
    where sequences adopt exactly what someone relies on.
    """

    def __init__(
        self,
        pool: BlockPool,
        fingerprint: str,
        on_change: Callable[[list[bytes], list[bytes]], None] = lambda inserted, evicted: None,
        *,
        keeps_unfilled: bool = True,
    ) -> None:
        self.pool = pool
        self._keeps_unfilled = keeps_unfilled
        self.policy = PrefixPolicy()
        self._root = chain_root(fingerprint, pool.block_size)
        self._cached: dict[bytes, _Cached] = {}
        self._on_change = on_change
        self._full_bytes = pool.block_size * TOKEN_BYTES
        pool.reclaim = self._reclaim

    def __len__(self) -> int:
        return len(self._cached)

    @property
    def blocks(self) -> list[int]:
        """The cached blocks, one reference to each of which is the cache's."""
        return [cached.block for cached in self._cached.values()]

    @property
    def names(self) -> list[bytes]:
        """Names of the cached full blocks, each after those before it in its chain."""
        return [name for name, cached in self._cached.items() if len(cached.tokens) == self._full_bytes]

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        """The names of the full blocks of `tokens`."""
        return extend_chain(self._root, [], tokens, self.pool.block_size)

    # -- a sequence's life -------------------------------------------------------------------------------------

    def lease(self, tokens: Sequence[int]) -> Lease:
        """The lease of a sequence that uses nothing yet."""
        return Lease(self.hashes(tokens))

    def adopt(
        self, tokens: Sequence[int], full_blocks: int | None = None, lease: Lease | None = None
    ) -> tuple[Lease, list[int], int]:
        """All blocks for `tokens`, how many of the tokens have their KV in them already, and the lease to `end`.

        `full_blocks`: adopt exactly so many, as someone is going to write the others. `lease`: the sequence's, which
        uses nothing; it saves naming the blocks again. Raises MissingBlocks and OutOfBlocks, with nothing taken.
        """
        size = self.pool.block_size
        hashes = extend_chain(self._root, [] if lease is None else lease.hashes, tokens, size)
        held = self.policy.match(hashes)
        source: tuple[bytes, int] | None = None
        if full_blocks is not None:
            if held < full_blocks:
                raise MissingBlocks(full_blocks, held)
            held = full_blocks
        elif held * size == len(tokens):
            held -= 1
            source = hashes[held], size - 1
        else:
            source = self._partial(hashes, held, tokens)
        lease = lease or Lease(hashes)
        shared = [self._cached[name].block for name in hashes[:held]]
        self.pool.retain(shared)
        self._pin(lease, held)
        try:
            own, copied = self._allocate(hashes[:held], source, self.pool.blocks_for(len(tokens)) - held)
        except OutOfBlocks:
            self.end(lease)
            self.pool.release(shared)
            raise
        self.policy.touch(hashes, held)
        return lease, shared + own, held * size + copied

    def keep(self, lease: Lease, tokens: Sequence[int], blocks: Sequence[int], *, last: bool = False) -> None:
        """Cache the full blocks of `tokens`, whose KV is in `blocks`; with `last` the unfilled last one as well.

        A block that is cached already stays as it is, and the sequence's own is private for ever.
        """
        hashes = extend_chain(self._root, lease.hashes, tokens, self.pool.block_size)
        full = len(tokens) // self.pool.block_size
        path = hashes[:full]
        data = token_bytes(tokens)
        if last and self._keeps_unfilled and len(data) > full * self._full_bytes:
            rest = data[full * self._full_bytes :]
            parent = path[-1] if path else self._root
            if not any(self._cached[name].tokens.startswith(rest) for name in self._branches(path, full)):
                path = [*path, block_hash(parent, rest)]
        known = self.policy.insert(path)
        self.pool.retain(blocks[known : len(path)])
        for index in range(known, len(path)):
            content = data[index * self._full_bytes : (index + 1) * self._full_bytes]
            self._cached[path[index]] = _Cached(blocks[index], content)
        if known < full:
            self._on_change(path[known:full], [])
        if not last:
            self._pin(lease, full)

    def end(self, lease: Lease) -> None:
        """The sequence uses nothing of the cache any more. Idempotent."""
        self._pin(lease, 0)

    # -- for tests and idle moments ----------------------------------------------------------------------------

    def evict_all(self) -> None:
        """Give back everything that nobody has pinned."""
        self._evict(self.policy.evictable)

    def check_integrity(self) -> None:
        """Asserts that every cached block is referenced, once cached, and counted by the policy."""
        self.policy.check_integrity()
        assert self.policy.size == len(self._cached), "policy and store differ in size"
        blocks = self.blocks
        assert len(set(blocks)) == len(blocks), "a block is cached twice"
        assert all(self.pool.references(block) for block in blocks), "a cached block is free"

    # -- inside ------------------------------------------------------------------------------------------------

    def _partial(self, hashes: list[bytes], held: int, tokens: Sequence[int]) -> tuple[bytes, int] | None:
        """The cached block after the first `held` that shares most tokens with what follows, and how many."""
        size = self.pool.block_size
        wanted = token_bytes(tokens[held * size : min((held + 1) * size, len(tokens) - 1)])
        best: tuple[bytes, int] | None = None
        for name in self._branches(hashes, held):
            count = _common_tokens(self._cached[name].tokens, wanted)
            if count > (best[1] if best else 0):
                best = name, count
        return best

    def _branches(self, path: list[bytes], count: int) -> Iterable[bytes]:
        return (name for name, _ in zip(self.policy.following(path, count), range(BRANCHES), strict=False))

    def _allocate(self, path: list[bytes], source: tuple[bytes, int] | None, count: int) -> tuple[list[int], int]:
        """`count` blocks, the first of which begins with the KV of `source`; how many tokens that are."""
        if source is None or count == 0:
            return self.pool.allocate(count), 0
        name, tokens = source
        branch = [*path, name]
        self.policy.pin(branch, len(branch))
        try:
            own = self.pool.allocate(count)
            original = self._cached[name].block
            self.pool.storage[own[0], :tokens] = self.pool.storage[original, :tokens]
            self.policy.touch(branch, len(branch))
        except OutOfBlocks:
            tokens = 0
        finally:
            self.policy.unpin(branch, len(branch))
        # perhaps there is room if the block that was to be copied makes it
        return (own, tokens) if tokens else (self.pool.allocate(count), 0)

    def _pin(self, lease: Lease, count: int) -> None:
        """Move a lease's pins to the first `count` blocks of its path."""
        before, lease.pinned = lease.pinned, count
        self.policy.pin(lease.hashes, count)
        self.policy.unpin(lease.hashes, before)

    def _reclaim(self, count: int) -> None:
        """The pool lacks `count` blocks. All or nothing: a request that fails anyway must not empty the cache."""
        if self.policy.evictable >= count:
            self._evict(count)

    def _evict(self, count: int) -> None:
        names = [name for piece in self.policy.evict(count) for name in reversed(piece)]
        evicted = [self._cached.pop(name) for name in names]
        self.pool.release([cached.block for cached in evicted])
        full = [n for n, cached in zip(names, evicted, strict=True) if len(cached.tokens) == self._full_bytes]
        if full:
            self._on_change([], full)


def _common_tokens(ours: bytes, theirs: bytes) -> int:
    """Length in tokens of the common beginning of two `token_bytes`."""
    limit = min(len(ours), len(theirs)) // TOKEN_BYTES
    for count in range(limit):
        at = count * TOKEN_BYTES
        if ours[at : at + TOKEN_BYTES] != theirs[at : at + TOKEN_BYTES]:
            return count
    return limit
