"""Penalties and biases against vLLM's definition, written down here once more; counts that follow a sequence."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.engine.drive import Stand, prompt
from workers.engine import Chunk, Sampling, Sequence, generate
from workers.engine.sampling import Row, TokenCounts, choose
from workers.models import LoadedModel

VOCAB = 12
ids = st.lists(st.integers(0, VOCAB - 1), max_size=20)
penalties = st.sampled_from([0.0, -2.0, 2.0, 0.3]) | st.floats(-2, 2)


def as_vllm(logits: np.ndarray, sampling: Sampling, before: list[int], answer: list[int], position: int) -> np.ndarray:
    """`Sampler.apply_logits_processors` of vLLM for one row: what changes a greedy choice, before the temperature."""
    row = logits.astype(np.float32).copy()
    if position < sampling.barred_until:
        row[list(sampling.barred)] = -np.inf
    for token, bias in sampling.logit_bias:
        row[token] += np.float32(bias)
    counts = np.bincount(answer, minlength=VOCAB).astype(np.float32)
    for token in {*before, *answer}:
        factor = np.float32(sampling.repetition_penalty)
        row[token] *= np.float32(1) / factor if row[token] > 0 else factor
    row -= np.float32(sampling.frequency_penalty) * counts
    row -= np.float32(sampling.presence_penalty) * (counts > 0)
    return row


def counted(before: list[int], answer: list[int], cut: int = 0) -> TokenCounts:
    """Of a sequence that came in two parts."""
    tokens, counts = [*before, *answer], TokenCounts(VOCAB, torch.device("cpu"))
    counts.extend(tokens[:cut], len(before))
    counts.extend(tokens[cut:], len(before))
    return counts


@given(
    st.lists(st.floats(-40, 40, width=32), min_size=VOCAB, max_size=VOCAB),
    *(ids, ids, st.floats(0.01, 100), penalties, penalties),
    st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5),
    st.sets(st.integers(0, VOCAB - 1), max_size=4),
    st.data(),
)
def test_a_choice_is_the_one_that_vllm_defines_with_and_without_guesses(
    values: list[float],
    before: list[int],
    answer: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    barred: set[int],
    data: st.DataObject,
) -> None:
    position = len(before) + len(answer)
    sampling = Sampling(
        **{"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency},
        **{"logit_bias": tuple(bias.items()), "barred": tuple(barred), "logprobs": 3},  # type: ignore[arg-type]
        barred_until=data.draw(st.sampled_from([0, position + 1])),
    )
    guessed = data.draw(st.integers(0, len(answer)))
    counts = counted(before, answer[:guessed], data.draw(st.integers(0, len(before) + guessed)))
    kept = counts.answered.clone()
    logits = torch.tensor([values, values, values])
    row = Row(sampling, position, counts, tuple(answer[guessed:]))
    plain, choice, after = choose(logits, [Row(Sampling(logprobs=3), position), row, Row(Sampling(), position)])
    expected = as_vllm(np.array(values), sampling, before, answer, position)
    assert not isinstance(choice, Exception)
    assert expected[choice.token] == pytest.approx(expected.max(), rel=1e-5, abs=1e-5)
    raw = logits[0].log_softmax(-1)
    assert choice.logprob == pytest.approx(float(raw[choice.token]), abs=1e-4)
    assert not isinstance(plain, Exception)
    assert not isinstance(after, Exception)
    assert choice.top == plain.top
    assert plain.token == after.token == int(logits[0].argmax())
    assert torch.equal(counts.answered, kept)


@pytest.mark.parametrize("repetition", [5e-324, 1e-310, 1e-38, 1e38, 1e308])
@pytest.mark.parametrize("temperature", [0, 5e-324, 2])
def test_a_penalty_beyond_float32_leaves_something_to_choose(repetition: float, temperature: float) -> None:
    counts = counted(list(range(VOCAB)), [])
    values = [3.0, -2.0, 0.0, *[1.0] * (VOCAB - 3)]
    (choice,) = choose(
        torch.tensor([values]), [Row(Sampling(temperature=temperature, repetition_penalty=repetition), 30, counts)]
    )
    assert not isinstance(choice, Exception)
    if temperature < 1:
        assert values[choice.token] >= (1 if repetition < 1 else 0)


def test_counts_follow_a_sequence_that_forgets_guesses(tiny: LoadedModel) -> None:
    sampling = Sampling(30, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4)
    prompt_ids = prompt(tiny, 20)
    expected = generate(tiny, prompt_ids, sampling)
    stand = Stand(tiny)
    sequence = stand.admit(prompt_ids)
    sequence.sampling = sampling
    stand.feed(sequence, 20)
    for _ in range(5):
        stand.step(Chunk(sequence, 1))
    known = len(sequence.tokens)
    stand.engine.append(sequence, [1, 1, 1])
    stand.feed(sequence, 3)
    sequence.forget(known)
    stand.engine.append(sequence, expected[known - 20 : known - 18])
    while sequence.finish_reason is None:
        stand.step(Chunk(sequence, sequence.pending))
    assert stand.answer(sequence) == expected


def test_of_a_replays_prompt_what_was_answered_is_of_the_answer(tiny: LoadedModel) -> None:
    options = {"ignore_eos": True, "presence_penalty": 0.7, "frequency_penalty": 0.9, "answer_from": 20}
    prompt_ids = prompt(tiny, 20)
    expected = generate(tiny, prompt_ids, Sampling(40, **options))  # type: ignore[arg-type]
    for done in (1, 17):
        again = generate(tiny, prompt_ids + expected[:done], Sampling(40 - done, **options))  # type: ignore[arg-type]
        assert expected[:done] + again == expected


def test_a_sequence_without_penalties_counts_nothing(tiny: LoadedModel) -> None:
    stand = Stand(tiny)
    sequence = stand.admit(prompt(tiny, 20))
    sequence.sampling = Sampling(5, logit_bias=((7, 3.0),))
    stand.finish(sequence)
    assert isinstance(sequence, Sequence)
    assert sequence.counts is None
