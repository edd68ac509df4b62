"""Links beside a row of datacenters: no two on top of each other, and no crossing that can be avoided."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from testbed.graph.layout import Track, ports, tracks

ENDS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] != pair[1]), max_size=20)


@given(ENDS)
def test_links_on_one_track_do_not_overlap(ends: list[tuple[int, int]]) -> None:
    laid = tracks(ends)
    assert [(track.start, track.end) for track in laid] == [(min(pair), max(pair)) for pair in ends]
    for one, other in combinations(laid, 2):
        if one.depth == other.depth:
            assert one.end <= other.start or other.end <= one.start


@given(ENDS)
def test_every_link_leaves_both_of_its_datacenters_once(ends: list[tuple[int, int]]) -> None:
    laid = tracks(ends)
    for position in range(8):
        there = ports(laid, position)
        assert sorted(track.link for track in there) == [n for n, pair in enumerate(ends) if position in pair]


def crossings(laid: tuple[Track, ...], datacenters: int) -> int:
    """How often a link's way to its track crosses another link's track."""
    order = {(track.link, p): n for p in range(datacenters) for n, track in enumerate(ports(laid, p))}

    def at(track: Track, position: int) -> tuple[int, int]:
        return position, order[track.link, position]

    return sum(
        at(other, other.start) < at(track, position) < at(other, other.end)
        for track in laid
        for position in (track.start, track.end)
        for other in laid
        if other.depth < track.depth
    )


def test_chains_rings_and_parallel_links_do_not_cross() -> None:
    for count in range(2, 8):
        chain = [(n, n + 1) for n in range(count - 1)]
        assert crossings(tracks(chain), count) == 0
        assert crossings(tracks([*chain, (count - 1, 0)]), count) == 0
        assert crossings(tracks([*chain, *chain, *chain, (count - 1, 0)]), count) == 0
    star = [(2, n) for n in (0, 1, 3, 4)]
    assert crossings(tracks(star), 5) == 0


def test_a_full_mesh_of_four_crosses_only_where_it_must() -> None:
    # Two links leave the middle datacenters past the longest neighbours: one crossing in a half plane.
    assert crossings(tracks(list(combinations(range(4), 2))), 4) == 1
