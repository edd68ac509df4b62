"""Edges of a step: exact multiples, the end of memory, of the context and of the answer."""

import pytest

from tests.workers.engine.drive import Stand, prompt
from workers.engine import Chunk, ContextTooLong, OutOfBlocks, Sampling, Sequence, generate
from workers.models import LoadedModel


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_prompt_gets_no_block_too_many(tiny: LoadedModel, tokens: int, blocks: int) -> None:
    stand = Stand(tiny)
    sequence = stand.admit(prompt(tiny, tokens))
    assert len(sequence.blocks) == blocks
    stand.feed(sequence, tokens)
    assert len(sequence.tokens) == tokens + 1
    assert len(sequence.blocks) == blocks  # the sampled token has no KV yet
    stand.step(Chunk(sequence, 1))
    assert len(sequence.blocks) == -(-(tokens + 1) // 16)


def test_admitting_more_than_the_pool_holds_allocates_nothing(tiny: LoadedModel) -> None:
    stand = Stand(tiny, num_blocks=4)
    with pytest.raises(OutOfBlocks):
        stand.admit(prompt(tiny, 65))
    assert stand.pool.free_count == 4
    stand.check()


def test_running_out_of_blocks_leaves_the_sequence_able_to_go_on(tiny: LoadedModel) -> None:
    stand = Stand(tiny, num_blocks=2)
    sequence = stand.admit(prompt(tiny, 16), max_tokens=20)
    stand.held = stand.pool.allocate(1)
    stand.feed(sequence, 16)
    before = list(sequence.tokens)
    with pytest.raises(OutOfBlocks):
        stand.engine.step([Chunk(sequence, 1)])
    assert (sequence.tokens, sequence.computed, len(sequence.blocks)) == (before, 16, 1)
    stand.pool.release(stand.held)
    stand.held = []
    while len(sequence.tokens) < 33:
        stand.step(Chunk(sequence, 1))
    expected = generate(tiny, before[:16], Sampling(max_tokens=17, ignore_eos=True))
    assert sequence.tokens[16:] == expected


def test_a_prompt_that_fills_the_context_is_refused_by_name_and_number(tiny: LoadedModel) -> None:
    stand = Stand(tiny, num_blocks=300)
    for length in (4096, 4097, 5000):
        with pytest.raises(ContextTooLong, match=rf'{length} tokens .* model "tiny" \(4096\)'):
            stand.admit([65] * length)
    assert stand.pool.free_count == 300


def test_an_answer_ends_where_the_context_does(tiny: LoadedModel) -> None:
    stand = Stand(tiny, num_blocks=300)
    sequence = stand.admit(prompt(tiny, 4090), max_tokens=100)
    stand.finish(sequence)
    assert len(sequence.tokens) == 4096
    assert sequence.finish_reason == "length"
    assert stand.pool.blocks_for(4095) == len(sequence.blocks)


@pytest.mark.parametrize("tokens", [[], [258], [-1], [65, 1000]])
def test_impossible_tokens_are_refused(tiny: LoadedModel, tokens: list[int]) -> None:
    stand = Stand(tiny)
    with pytest.raises(ValueError, match="token"):
        stand.engine.admit(Sequence("x", tokens, max(1, len(tokens))))
    stand.check()


def test_an_answer_stops_at_a_stop_token_and_at_max_tokens(tiny: LoadedModel) -> None:
    ids = prompt(tiny, 20)
    full = generate(tiny, ids, Sampling(max_tokens=30, ignore_eos=True))
    assert len(full) == 30
    third_new = next(i for i in range(3, 30) if full[i] not in full[:i])
    stopped = generate(tiny, ids, Sampling(max_tokens=30, stop_token_ids=(full[third_new],)))
    assert stopped == full[: third_new + 1]
    assert generate(tiny, ids, Sampling(max_tokens=1)) == full[:1]


def test_a_sequence_that_arrives_finished_is_known_to_be(tiny: LoadedModel) -> None:
    stand = Stand(tiny)
    eos = min(tiny.tokenizer.eos_ids)
    ended = Sequence("a", [65, 66, eos], 2, Sampling(max_tokens=9))
    stand.engine.admit(ended)
    assert ended.finish_reason == "stop"
    asked = Sequence("b", [65, 66, eos], 3, Sampling(max_tokens=9))  # an end-of-text within a prompt ends nothing
    stand.engine.admit(asked)
    assert asked.finish_reason is None


def test_known_ids_that_end_the_answer_get_their_kv_but_no_successor(tiny: LoadedModel) -> None:
    stand = Stand(tiny)
    sequence = stand.admit(prompt(tiny, 20), max_tokens=5)
    stand.feed(sequence, 20)
    stand.engine.append(sequence, [65, 66, 67, 68])
    assert sequence.finish_reason == "length"
    (generated,) = stand.engine.step([Chunk(sequence, sequence.pending)])
    assert (generated.token_id, generated.position, generated.finish_reason) == (68, 24, "length")
    assert sequence.computed == len(sequence.tokens) == 25
