"""However the work is cut up, the KV and the answer are the same: the ground that hand-over stands on."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

from tests.workers.engine.drive import LENGTHS, Stand, prompt, relative_difference
from workers.engine import Sampling, generate
from workers.models import LoadedModel
from workers.models.fetch import BUILT_IN

KV_TOLERANCE = 1e-5
ANSWER = 16


MODELS = ["tiny", "tiny_mla", "smollm2"]
EVERY = list(product(MODELS, LENGTHS))
SAMPLE = {("smollm2", 1), ("smollm2", 17, 7), ("smollm2", 16)}  # of smollm2's cases, those that each commit runs


def cases(every: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The built-in models' for every commit; smollm2's, which take long, in the nightly lane but for a sample."""
    return [
        pytest.param(*case, marks=[pytest.mark.nightly] if case[0] == "smollm2" and case not in SAMPLE else [])
        for case in every
    ]


@pytest.fixture
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    model: LoadedModel = request.getfixturevalue(request.param)
    return model


_controls: dict[tuple[str, int], tuple[Stand, list[int]]] = {}


def control(loaded: LoadedModel, length: int) -> tuple[Stand, list[int]]:
    """One process, prefill in one go, then token by token. Computed once for all tests."""
    key = (loaded.config.name, length)
    if key not in _controls:
        stand = Stand(loaded)
        sequence = stand.admit(prompt(loaded, length), max_tokens=ANSWER)
        stand.finish(sequence)
        _controls[key] = stand, stand.answer(sequence)
    return _controls[key]


def assert_same(loaded: LoadedModel, length: int, stand: Stand) -> None:
    reference, answer = control(loaded, length)
    sequence = stand.sequences[0]
    assert stand.answer(sequence) == answer
    computed = length + ANSWER - 1
    assert sequence.computed == computed
    difference = relative_difference(stand.kv(sequence, computed), reference.kv(reference.sequences[0], computed))
    assert difference <= KV_TOLERANCE


@pytest.mark.parametrize(("loaded", "length"), cases(EVERY[: 2 * len(LENGTHS) + 1]), indirect=["loaded"])
def test_generate_is_the_same_as_stepping_by_hand(loaded: LoadedModel, length: int) -> None:
    sampling = Sampling(max_tokens=ANSWER, ignore_eos=True)
    assert generate(loaded, prompt(loaded, length), sampling) == control(loaded, length)[1]


# 500 single steps of SmolLM2 would take 20 s; its last 40 are stepped in the next test.
CHUNKS = [(*case, chunk) for case in EVERY for chunk in (1, 7, 64) if case != ("smollm2", 500) or chunk == 64]


@pytest.mark.parametrize(("loaded", "length", "chunk"), cases(CHUNKS), indirect=["loaded"])
def test_prefill_in_chunks_equals_prefill_in_one_go(loaded: LoadedModel, length: int, chunk: int) -> None:
    stand = Stand(loaded)
    sequence = stand.admit(prompt(loaded, length), max_tokens=ANSWER)
    stand.feed(sequence, chunk)
    stand.finish(sequence)
    assert_same(loaded, length, stand)


@pytest.mark.parametrize("loaded", cases([(name,) for name in MODELS]), indirect=True)
def test_the_end_of_a_long_prompt_token_by_token_equals_one_go(loaded: LoadedModel) -> None:
    stand = Stand(loaded)
    sequence = stand.admit(prompt(loaded, 500), max_tokens=ANSWER)
    stand.feed(sequence, 460)
    stand.feed(sequence, 1)
    stand.finish(sequence)
    assert_same(loaded, 500, stand)


@pytest.mark.parametrize("known", [1, 9, ANSWER - 1])
@pytest.mark.parametrize(("loaded", "length"), cases(EVERY), indirect=["loaded"])
def test_extending_known_answer_tokens_equals_having_decoded_them(loaded: LoadedModel, length: int, known: int) -> None:
    """What the main decode does at the hand-over: prompt KV from elsewhere, token ids extended in one step."""
    reference, answer = control(loaded, length)
    stand = Stand(loaded)
    sequence = stand.admit(prompt(loaded, length) + answer[:1], prompt_len=length, max_tokens=ANSWER)
    source = reference.sequences[0]
    for index in range(stand.pool.blocks_for(length)):
        tokens = min(16, length - 16 * index)
        stand.pool.view(sequence.blocks[index], tokens)[:] = reference.pool.view(source.blocks[index], tokens)
    sequence.computed = length
    if known > 1:
        stand.engine.append(sequence, answer[1:known])
    stand.finish(sequence)
    assert_same(loaded, length, stand)


@pytest.mark.parametrize("loaded", cases([(name,) for name in MODELS]), indirect=True)
def test_a_sequence_in_a_batch_of_sixteen_answers_as_it_does_alone(loaded: LoadedModel) -> None:
    lengths = [*LENGTHS[:4], 33, 64, 100, 48, 2, 3, 31, 32, 80, 5, 77, 128]
    builtin = loaded.config.name in BUILT_IN
    answer = 40 if builtin else 8
    stand = Stand(loaded, num_blocks=200)
    sequences = [stand.admit(prompt(loaded, n), max_tokens=answer) for n in lengths]
    stand.finish(*sequences)
    sampling = Sampling(max_tokens=answer, ignore_eos=True)
    for sequence in sequences[:: 1 if builtin else 4]:
        alone = generate(loaded, sequence.tokens[: sequence.prompt_len], sampling)
        assert stand.answer(sequence) == alone


def test_any_block_size_gives_the_same_answer(tiny: LoadedModel) -> None:
    _, answer = control(tiny, 500)
    for block_size in (1, 5, 64, 1024):
        stand = Stand(tiny, num_blocks=2000 // block_size + 1, block_size=block_size)
        sequence = stand.admit(prompt(tiny, 500), max_tokens=ANSWER)
        stand.finish(sequence)
        assert stand.answer(sequence) == answer
