"""Attention in groups: what is put together, and that neither neighbours nor what the memory held before matter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.engine.drive import Stand, prompt
from workers.engine import Chunk, Sampling, generate
from workers.engine.paged import FEW, Segment, group
from workers.models import LoadedModel

SEGMENTS = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(1, 40)).map(lambda pair: Segment(pair[0], sum(pair), ())), max_size=40
)


@given(SEGMENTS, st.integers(1, 10_000))
def test_every_segment_is_in_one_group_of_its_like(segments: list[Segment], max_tokens: int) -> None:
    groups = group(segments, max_tokens)
    assert sorted(index for members in groups for index in members) == list(range(len(segments)))
    for members in groups:
        several = [segments[index] for index in members]
        assert len({segment.new for segment in several}) == 1
        if len(several) > 1:
            longest = max(segment.end for segment in several)
            assert several[0].new <= FEW
            assert longest * len(several) <= max_tokens
            assert longest <= 1.5 * min(segment.end for segment in several) + 64


def test_segments_of_one_kind_are_one_group_in_their_order() -> None:
    assert group([Segment(49, 50, ())] * 16, 800) == [list(range(16))]
    assert [len(members) for members in group([Segment(49, 50, ())] * 16, 799)] == [15, 1]


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_what_the_memory_held_before_changes_no_answer(tiny: LoadedModel, poison: float) -> None:
    """Blocks come back from others, perhaps with the rest of a broken transfer in them."""
    stand = Stand(tiny, num_blocks=120)
    stand.pool.storage.fill_(poison)
    sequences = [stand.admit(prompt(tiny, length), max_tokens=20) for length in (3, 90, 16, 33, 250, 17)]
    stand.finish(*sequences)
    for sequence in sequences:
        alone = generate(tiny, sequence.tokens[: sequence.prompt_len], Sampling(max_tokens=20, ignore_eos=True))
        assert stand.answer(sequence) == alone


def test_decodes_short_extends_and_prefills_share_steps_and_answer_as_alone(tiny: LoadedModel) -> None:
    """Segments of 1, 2, 5, 16 and 40 tokens in one step, in an order that no group has."""
    lengths = [50, 300, 7, 120, 64, 33, 500, 18]
    takes = [1, 16, 5, 40, 1, 2, 5, 2]
    alone = {n: generate(tiny, prompt(tiny, n), Sampling(max_tokens=24, ignore_eos=True)) for n in lengths}
    stand = Stand(tiny, num_blocks=200)
    sequences = [stand.admit(prompt(tiny, n), max_tokens=24) for n in lengths]
    while running := [s for s in sequences if s.finish_reason is None]:
        chunks = [Chunk(s, min(s.pending, takes[lengths.index(s.prompt_len)])) for s in running]
        stand.step(*reversed(chunks))
    assert [stand.answer(s) for s in sequences] == [alone[n] for n in lengths]


def test_a_group_attends_as_each_of_its_segments_would_alone(tiny: LoadedModel) -> None:
    """The logits behind the tokens, so that a small difference shows before it changes a token."""
    from workers.engine.paged import PagedAttention

    stand = Stand(tiny, num_blocks=120)
    sequences = [stand.admit(prompt(tiny, n)) for n in (40, 44, 61, 100)]
    for sequence in sequences:
        stand.feed(sequence, sequence.pending)
        stand.engine.append(sequence, [65, 66, 67])
        stand.engine.grow(sequence, 4)

    @torch.inference_mode()
    def logits(*segments: Segment) -> torch.Tensor:
        tokens = [t for s, segment in zip(chosen, segments, strict=True) for t in s.tokens[segment.start : segment.end]]
        positions = [p for segment in segments for p in range(segment.start, segment.end)]
        attention = PagedAttention(tiny.config, stand.pool, segments)
        return tiny.model(torch.tensor(tokens), torch.tensor(positions), None, attention)

    chosen = sequences
    segments = [Segment(s.computed, len(s.tokens), s.blocks) for s in sequences]
    together = logits(*segments).split(4)
    for sequence, segment, ours in zip(sequences, segments, together, strict=True):
        chosen = [sequence]
        assert (logits(segment) - ours).abs().max() < 1e-5 * ours.abs().max()
