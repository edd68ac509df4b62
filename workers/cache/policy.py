"""The policy of a prefix cache on extents, runs of blocks used together. Pure: no tensors, no clocks.

The blocks are named by *paths*: sequences whose i-th item names the block i together with everything before it, so
that two paths are equal up to i exactly when their items at i are. The live store's paths are lists of chained hashes;
a simulator's are `ExtentPath`s, whose work does not grow with their length. The rules, block by block:

- matched: the longest run of cached blocks from a path's beginning;
- kept: every block that was ever inserted, until its memory is needed;
- evicted: the block used least recently among those that no other cached block continues and nobody has pinned. (A
  block is used whenever one that continues it is.)
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, overload

Path = Sequence[Any]  # of hashable items


class ExtentPath(Sequence[Hashable]):
    """The path of [(prefix, length in blocks), ...]: `length` blocks of each prefix's own, one after the other.

    A prefix names its text and all that comes before it. `ExtentPath([("system", 100), ("chat 7", 20)])` and
    `ExtentPath([("system", 100), ("chat 8", 5)])` have 100 blocks in common.
    """

    def __init__(self, extents: Iterable[tuple[Hashable, int]], start: int = 0, end: int | None = None) -> None:
        self._extents = list(extents)
        self._ends = list(accumulate(length for _, length in self._extents))
        total = self._ends[-1] if self._ends else 0
        self._start = start
        self._length = (total if end is None else end) - start

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Hashable: ...
    @overload
    def __getitem__(self, index: slice) -> ExtentPath: ...
    def __getitem__(self, index: int | slice) -> Hashable | ExtentPath:
        if isinstance(index, slice):
            start, stop, _ = index.indices(self._length)
            return ExtentPath(self._extents, self._start + start, self._start + max(start, stop))
        if not -self._length <= index < self._length:
            raise IndexError(index)
        at = self._start + index % self._length
        return self._extents[bisect_right(self._ends, at)][0], at


class Extent:
    """A run of blocks that were last used at the same time. `label` names them, as a piece of a path."""

    __slots__ = ("children", "label", "parent", "pins", "used")

    def __init__(self, label: Path, parent: Extent | None, used: int, pins: int = 0) -> None:
        self.label = label
        self.parent = parent  # None: the root, or no longer cached
        self.children: dict[Any, Extent] = {}  # by the name of their first block
        self.used = used
        self.pins = pins


class PrefixPolicy:
    """The cache's contents as a radix tree of extents. `size` and `pinned` count blocks."""

    def __init__(self) -> None:
        self.size = 0
        self.pinned = 0
        self._root = Extent((), None, 0)
        self._clock = 0
        self._extents = 0
        self._leaves: list[tuple[int, int, Extent]] = []  # a heap by last use; entries may be out of date
        self._entries = 0

    @property
    def evictable(self) -> int:
        """Blocks that `evict` could give back."""
        return self.size - self.pinned

    def match(self, path: Path) -> int:
        """Number of the path's first blocks that are cached. Changes nothing."""
        return sum(count for _, count in self._walk(path, len(path)))

    def match_pinned(self, path: Path) -> int:
        """Number of the path's first blocks that are cached and pinned: whoever adopts them takes no memory."""
        return sum(count for extent, count in self._walk(path, len(path)) if extent.pins)

    def following(self, path: Path, count: int) -> Iterator[Any]:
        """Names of the cached blocks that continue the path's first `count` ones, the newest branch first."""
        steps = self._walk(path, count)
        if sum(used for _, used in steps) < count:
            return
        last, used = steps[-1] if steps else (self._root, 0)
        if used < len(last.label):
            yield last.label[used]
        else:
            yield from reversed(last.children)

    def touch(self, path: Path, count: int) -> None:
        """Its first `count` blocks, all of them cached, are used now."""
        self._use(path, self._cut(path, count))

    def insert(self, path: Path) -> int:
        """Cache the whole path, which is used now. Returns how many of its first blocks were cached before."""
        matched = self.match(path)
        extents = self._cut(path, matched)
        if matched < len(path):
            parent = extents[-1] if extents else self._root
            extent = Extent(path[matched:], parent, 0)
            parent.children[path[matched]] = extent
            extents.append(extent)
            self.size += len(extent.label)
            self._extents += 1
        self._use(path, extents)
        return matched

    def pin(self, path: Path, count: int) -> None:
        """Keep its first `count` blocks, all of them cached, until `unpin` with the same arguments."""
        for extent in self._cut(path, count):
            extent.pins += 1
            if extent.pins == 1:
                self.pinned += len(extent.label)

    def unpin(self, path: Path, count: int) -> None:
        for extent in self._cut(path, count):
            assert extent.pins > 0, "unpinned more often than pinned"
            extent.pins -= 1
            if extent.pins == 0:
                self.pinned -= len(extent.label)
                self._note_leaf(extent)

    def evict(self, count: int) -> list[Path]:
        """Give up to `count` blocks back; returns their names as pieces of paths, after what continued them."""
        evicted: list[Path] = []
        wanted = count
        while wanted > 0 and self._leaves:
            used, _, extent = heapq.heappop(self._leaves)
            if extent.parent is None or extent.children or extent.pins or extent.used != used:
                continue
            left = max(0, len(extent.label) - wanted)
            wanted -= len(extent.label) - left
            evicted.append(extent.label[left:])
            if left:
                extent.label = extent.label[:left]
                self._note_leaf(extent)
            else:
                self._remove(extent)
        self.size -= max(0, count) - max(0, wanted)
        return evicted

    def check_integrity(self) -> None:
        """Asserts that the counts are those of the tree, and that it is one."""
        extents = list(self._all())
        assert self.size == sum(len(extent.label) for extent in extents), "size is not what the extents hold"
        assert self.pinned == sum(len(extent.label) for extent in extents if extent.pins), "pinned blocks miscounted"
        assert self._extents == len(extents), "extents miscounted"
        noted = {(used, id(extent)) for used, _, extent in self._leaves}
        for extent in extents:
            assert len(extent.label) > 0, "an empty extent"
            for first, child in extent.children.items():
                assert child.parent is extent, "a child knows another parent"
                assert first == child.label[0], "a child under another name"
                assert child.used <= extent.used, "a block used more recently than what it continues"
                assert child.pins <= extent.pins, "a block pinned without what it continues"
            if not extent.children and not extent.pins:
                assert (extent.used, id(extent)) in noted, "a leaf that would never be evicted"

    # -- inside ------------------------------------------------------------------------------------------------

    def _all(self) -> Iterator[Extent]:
        stack = list(self._root.children.values())
        while stack:
            extent = stack.pop()
            stack += extent.children.values()
            yield extent

    def _walk(self, path: Path, limit: int) -> list[tuple[Extent, int]]:
        """The extents that hold the path's first blocks, up to `limit`; of the last perhaps only its first ones."""
        steps: list[tuple[Extent, int]] = []
        node, at = self._root, 0
        while at < limit and (child := node.children.get(path[at])) is not None:
            count = _common(child.label, path, at, limit)
            steps.append((child, count))
            at += count
            if count < len(child.label):
                break
            node = child
        return steps

    def _cut(self, path: Path, count: int) -> list[Extent]:
        """The extents that hold exactly the path's first `count` blocks, splitting the last where need be."""
        steps = self._walk(path, count)
        assert sum(used for _, used in steps) == count, f"fewer than {count} blocks of the path are cached"
        if steps and steps[-1][1] < len(steps[-1][0].label):
            self._split(*steps[-1])
        return [extent for extent, _ in steps]

    def _split(self, head: Extent, at: int) -> None:
        rest = Extent(head.label[at:], head, head.used, head.pins)
        rest.children = head.children
        for child in rest.children.values():
            child.parent = rest
        head.label = head.label[:at]
        head.children = {rest.label[0]: rest}
        self._extents += 1
        self._note_leaf(rest)

    def _use(self, path: Path, extents: list[Extent]) -> None:
        """Stamps the extents of a path's beginning, and joins those that nothing tells apart any more."""
        self._clock += 1
        if not extents:
            return
        at = 0
        runs: list[tuple[Extent, int, Extent]] = []  # head, where it starts, last
        for extent in extents:
            extent.used = self._clock
            head = runs[-1][0] if runs else None
            if head is not None and len(runs[-1][2].children) == 1 and head.pins == extent.pins:
                runs[-1] = (head, runs[-1][1], extent)
            else:
                runs.append((extent, at, extent))
            at += len(extent.label)
        ends = [start for _, start, _ in runs[1:]] + [at]
        for (head, start, last), end in zip(runs, ends, strict=True):
            if last is head:
                continue
            head.label = path[start:end]
            node: Extent | None = last
            while node is not None and node is not head:  # they are part of the head now
                parent, node.parent = node.parent, None
                self._extents -= 1
                node = parent
            head.children = last.children
            for child in head.children.values():
                child.parent = head
        self._note_leaf(runs[-1][0])

    def _note_leaf(self, extent: Extent) -> None:
        if extent.children or extent.pins or extent.parent is None:
            return
        self._entries += 1  # before the extent in a tuple: extents cannot be compared
        heapq.heappush(self._leaves, (extent.used, self._entries, extent))
        if len(self._leaves) > 4 * self._extents + 64:
            leaves = [leaf for leaf in self._all() if not leaf.children and not leaf.pins]
            self._leaves = [(leaf.used, number, leaf) for number, leaf in enumerate(leaves)]
            self._entries = len(leaves)
            heapq.heapify(self._leaves)

    def _remove(self, extent: Extent) -> None:
        parent = extent.parent
        assert parent is not None, "the root is not evicted"
        del parent.children[extent.label[0]]
        extent.parent = None
        self._extents -= 1
        self._note_leaf(parent)


def _common(label: Path, path: Path, start: int, limit: int) -> int:
    """Number of blocks that `label` and `path[start:limit]` share from their beginnings, the first of which they do."""
    low, high = 1, min(len(label), limit - start)
    if label[high - 1] == path[start + high - 1]:
        return high
    while low < high - 1:  # equal at low - 1, different at high - 1
        middle = (low + high) // 2
        if label[middle - 1] == path[start + middle - 1]:
            low = middle
        else:
            high = middle
    return low
