"""Merging by position: exactly once, in order, no gap, no duplicate, for every interleaving."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.gateway.merge import MergeConflict, PositionMerge


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[int, list[int], list[tuple[int, list[int], str | None, str]]]:
    """An answer cut into pieces by two instances: overlapping, repeated, in any order, covering everything."""
    start = draw(st.integers(0, 50))
    answer = draw(st.lists(st.integers(0, 300), min_size=1, max_size=40))
    pieces: list[tuple[int, list[int], str | None, str]] = []

    def piece(first: int, last: int, instance: str) -> None:
        finish = "length" if last == len(answer) else None
        pieces.append((start + first, answer[first:last], finish, instance))

    cuts = sorted(draw(st.sets(st.integers(1, len(answer)), max_size=8)) | {len(answer)})
    for first, last in zip([0, *cuts], cuts, strict=False):
        piece(first, last, draw(st.sampled_from(["rld0", "md0"])))
    for _ in range(draw(st.integers(0, 6))):
        first = draw(st.integers(0, len(answer) - 1))
        piece(first, draw(st.integers(first + 1, len(answer))), draw(st.sampled_from(["rld0", "md0"])))
    return start, answer, draw(st.permutations(pieces))


@given(deliveries())
def test_any_interleaving_gives_the_answer_once_and_in_order(
    case: tuple[int, list[int], list[tuple[int, list[int], str | None, str]]],
) -> None:
    start, answer, pieces = case
    merge = PositionMerge(start)
    out = []
    for index, piece in enumerate(pieces):
        out += merge.offer(*piece)
        given_so_far = {p + i for p, ids, _, _ in pieces[: index + 1] for i in range(len(ids))}
        contiguous = next(n for n in range(len(answer) + 1) if start + n not in given_so_far)
        assert len(out) == contiguous, "what is in order is returned at once, nothing before"
    assert [token.token_id for token in out] == answer
    assert [token.position for token in out] == list(range(start, start + len(answer)))
    assert merge.finished
    assert not merge.gap
    assert [token.finish_reason for token in out[:-1]] == [None] * (len(answer) - 1)


@given(deliveries(), st.data())
def test_one_differing_token_is_a_conflict_and_never_an_answer(
    case: tuple[int, list[int], list[tuple[int, list[int], str | None, str]]], data: st.DataObject
) -> None:
    start, answer, pieces = case
    at = data.draw(st.integers(0, len(answer) - 1))
    wrong = (start + at, [answer[at] + 1], "length" if at == len(answer) - 1 else None, "md9")
    pieces.insert(data.draw(st.integers(0, len(pieces))), wrong)
    merge = PositionMerge(start)

    def offer_all() -> None:
        for piece in pieces:
            merge.offer(*piece)

    with pytest.raises(MergeConflict, match=rf"position {start + at} is token"):
        offer_all()


def test_tokens_beyond_the_end_are_a_conflict() -> None:
    merge = PositionMerge(10)
    merge.offer(10, [1, 2], "stop", "rld0")
    assert merge.finished
    with pytest.raises(MergeConflict, match="ends before position 12, but md0 went on"):
        merge.offer(12, [3], None, "md0")


def test_two_ends_are_a_conflict() -> None:
    merge = PositionMerge(10)
    merge.offer(12, [3], "length", "md0")
    with pytest.raises(MergeConflict, match="ends the answer at 13"):
        merge.offer(13, [4], "length", "rld0")


def test_an_end_before_tokens_that_are_waiting_is_a_conflict() -> None:
    merge = PositionMerge(10)
    merge.offer(14, [3], None, "md0")
    with pytest.raises(MergeConflict, match="ends before position 12"):
        merge.offer(11, [4], "stop", "rld0")


def test_a_position_inside_the_prompt_is_a_conflict() -> None:
    with pytest.raises(MergeConflict, match="position 9, inside the prompt of 10 tokens"):
        PositionMerge(10).offer(9, [1], None, "rld0")


@pytest.mark.parametrize(
    ("position", "ids", "finish"), [(11, [9], "stop"), (13, [4, 9], None), (12, [3, 4, 9], None), (10, [1, 2], "stop")]
)
def test_what_conflicts_leaves_no_trace(position: int, ids: list[int], finish: str | None) -> None:
    merge = PositionMerge(10)
    merge.offer(10, [1, 2], None, "rld0")
    merge.offer(14, [5], None, "rld0")
    with pytest.raises(MergeConflict):
        merge.offer(position, ids, finish, "md0")
    ready = merge.offer(12, [3, 4], None, "rld0") + merge.offer(15, [6], "length", "rld0")
    assert [token.token_id for token in ready] == [3, 4, 5, 6]
    assert merge.finished
