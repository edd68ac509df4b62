"""Sampling: a pure function of seed, position and logits, with the distribution it promises."""

import math

import pytest
import torch

from tests.workers.engine.drive import Stand, prompt
from workers.engine import Chunk, Sampling, generate
from workers.engine.sampling import Row, _mix, choose, uniform
from workers.models import LoadedModel


def draw(logits: torch.Tensor, count: int, **options: float) -> list[int]:
    """`count` draws from one row of logits at successive positions."""
    requests = [Row(Sampling(seed=7, **options), position) for position in range(count)]  # type: ignore[arg-type]
    return [choice.token for choice in choose(logits.expand(count, -1), requests)]


def test_temperature_zero_takes_the_likeliest_and_reports_its_log_probability() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    (choice,) = choose(logits, [Row(Sampling(), 0)])
    assert choice.token == 1
    assert choice.top is None
    assert choice.logprob == pytest.approx(math.log(math.exp(2) / (1 + math.exp(2) + math.exp(1))), abs=1e-6)


def test_the_likeliest_tokens_come_with_the_log_probabilities_of_log_softmax() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 3
    expected = logits.log_softmax(-1)
    samplings = [
        Sampling(logprobs=0),
        Sampling(logprobs=5),
        Sampling(logprobs=60, temperature=1.5, top_p=0.5, seed=3),  # more than the vocabulary has
    ]
    for row, choice in enumerate(choose(logits, [Row(sampling, 9) for sampling in samplings])):
        assert choice.logprob == pytest.approx(float(expected[row, choice.token]), abs=1e-5)
        assert choice.top is not None
        assert len(choice.top) == min(samplings[row].logprobs or 0, 50)
        values, tokens = expected[row].sort(descending=True)
        assert [token for token, _ in choice.top] == tokens[: len(choice.top)].tolist()
        assert [logprob for _, logprob in choice.top] == pytest.approx(values[: len(choice.top)].tolist(), abs=1e-5)


def test_asking_for_log_probabilities_changes_no_token(tiny: LoadedModel) -> None:
    ids = prompt(tiny, 20)
    for options in ({}, {"temperature": 1.0, "seed": 4}):
        stand = Stand(tiny)
        sequence = stand.admit(ids, max_tokens=12)
        sequence.sampling = Sampling(max_tokens=12, ignore_eos=True, logprobs=2, **options)  # type: ignore[arg-type]
        given = []
        while sequence.finish_reason is None:  # the first one is prefill's
            given += stand.engine.step([Chunk(sequence, sequence.pending)])
        plain = Sampling(max_tokens=12, ignore_eos=True, **options)  # type: ignore[arg-type]
        assert stand.answer(sequence) == generate(tiny, ids, plain)
        for token in given:
            assert token.top_logprobs is not None
            assert len(token.top_logprobs) == 2
            if not options:
                assert token.top_logprobs[0] == (token.token_id, token.logprob)


def test_draws_follow_the_softmax_at_their_temperature() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = draw(probabilities.log() * 2, 4000, temperature=2.0)
    for token, probability in enumerate(probabilities.tolist()):
        share = draws.count(token) / len(draws)
        assert abs(share - probability) < 4 * math.sqrt(probability * (1 - probability) / len(draws))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.05, 0.5, 0.15, 0.3]).log()
    assert set(draw(logits, 500, temperature=1.0, top_p=0.8)) == {1, 3}
    assert set(draw(logits, 500, temperature=1.0, top_p=0.81)) == {1, 2, 3}
    assert set(draw(logits, 50, temperature=1.0, top_p=1e-9)) == {1}


def test_uniform_numbers_are_in_range_and_differ_by_seed_and_position() -> None:
    numbers = {uniform(seed, position) for seed in range(50) for position in range(50)}
    assert len(numbers) == 2500
    assert 0 <= min(numbers) < 0.01 < 0.99 < max(numbers) < 1
    assert abs(sum(numbers) / 2500 - 0.5) < 0.03
    assert uniform(-1, 3) != uniform(1, 3)
    assert 0 <= uniform(2**64 - 1, 2**31) < 1


def test_the_numbers_are_those_of_splitmix64() -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # its first outputs for seed 0
    assert [_mix(step * 0x9E3779B97F4A7C15 % 2**64) for step in range(3)] == published
    assert uniform(1, 2) == 0.04525699773739167


def test_a_sampled_answer_goes_on_unchanged_after_a_hand_over(tiny: LoadedModel) -> None:
    sampling = Sampling(max_tokens=40, temperature=1.0, top_p=0.95, seed=5, ignore_eos=True)
    ids = prompt(tiny, 30)
    whole = generate(tiny, ids, sampling)
    stand = Stand(tiny)
    moved = stand.admit(ids + whole[:15], prompt_len=30)
    moved.sampling = sampling
    stand.finish(moved)
    assert stand.answer(moved) == whole
    other = Sampling(max_tokens=40, temperature=1.0, top_p=0.95, seed=6, ignore_eos=True)
    assert generate(tiny, ids, other) != whole


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"logprobs": -1},
        {"logprobs": 65},
    ],
)
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampling(**options)  # type: ignore[arg-type]
