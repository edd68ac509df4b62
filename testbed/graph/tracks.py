"""How WAN links run beside a row of datacenters: each on a track of its own, parallel to the row. Pure.

Owns which links share a depth, and in which order they leave a datacenter. Short links run near the row; with that
order a link crosses another only where no order could prevent it.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Track:
    """One link: from the datacenter at position `start` to the one at `end` (start < end)."""

    link: int  # index
    start: int
    end: int
    depth: int  # 0 is nearest to the datacenters


def tracks(ends: Sequence[tuple[int, int]]) -> tuple[Track, ...]:
    """A track for every link, in the order of the links. `ends`: positions of its datacenters, in any order."""
    spans = [(max(pair) - min(pair), min(pair), index) for index, pair in enumerate(ends)]
    taken: list[list[tuple[int, int]]] = []  # per depth
    found: dict[int, Track] = {}
    for span, start, index in sorted(spans):
        end = start + span
        depth = 0
        # Links that only share a datacenter do not meet: one ends before the other begins (see `ports`).
        while depth < len(taken) and any(start < other_end and other < end for other, other_end in taken[depth]):
            depth += 1
        if depth == len(taken):
            taken.append([])
        taken[depth].append((start, end))
        found[index] = Track(index, start, end, depth)
    return tuple(found[index] for index in range(len(ends)))


def ports(laid: Sequence[Track], position: int) -> list[Track]:
    """The links of the datacenter at `position`, in the order in which they leave it along the row.

    First those that come from before it, the nearest track first; then those that go on, the farthest first.
    """
    coming = sorted((track for track in laid if track.end == position), key=lambda track: track.depth)
    going = sorted((track for track in laid if track.start == position), key=lambda track: -track.depth)
    return coming + going
