"""Guessing ahead changes nothing but the number of steps: not an answer, not the KV, not what the cache keeps."""

import asyncio
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.engine.drive import Stand, prompt, relative_difference, repetitive_model
from workers.cache import BlockCache
from workers.engine import BlockPool, Chunk, Drafter, EngineRunner, Sampling, Sequence, Speculation, generate
from workers.models import LoadedModel

GREEDY = Sampling(max_tokens=120, ignore_eos=True)
SEEDED = Sampling(max_tokens=120, ignore_eos=True, temperature=0.3, top_p=0.9, seed=11)
PENALISED = Sampling(
    *(120, 0.3), seed=11, ignore_eos=True, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3
)


@pytest.fixture(scope="module")
def repetitive() -> LoadedModel:
    return repetitive_model()


# -- the drafter -----------------------------------------------------------------------------------------------


def test_a_guess_is_what_followed_the_last_time() -> None:
    drafter = Drafter(Speculation(ngram=2, draft=3))
    assert drafter.propose([1, 2, 3, 4, 5, 9, 2, 3], 8) == [4, 5, 9]
    assert drafter.propose([1, 2, 3, 4, 5, 9, 2, 3, 7, 2, 3], 8) == [7, 2, 3]
    assert drafter.propose([1, 2, 3, 4, 5, 9, 2, 3, 7, 2, 3], 1) == [7]
    assert drafter.propose([1, 2, 3, 4, 5, 9, 2, 3, 7, 2, 3], 0) == []


def test_a_loop_is_guessed_beyond_what_is_known() -> None:
    assert Drafter(Speculation(ngram=2, draft=5)).propose([8, 6, 6, 6], 8) == [6] * 5
    assert Drafter(Speculation(ngram=2, draft=5)).propose([1, 2, 3, 1, 2], 8) == [3, 1, 2, 3, 1]


def test_nothing_is_guessed_where_nothing_repeats_or_too_little_is_known() -> None:
    assert Drafter(Speculation(ngram=2, draft=5)).propose([1, 2, 3, 4], 8) == []
    assert Drafter(Speculation(ngram=3, draft=5)).propose([1, 1], 8) == []


def test_guesses_get_shorter_when_they_fail_and_longer_when_they_hold() -> None:
    drafter = Drafter(Speculation(ngram=1, draft=8))
    lengths = []
    for accepted in (0, 0, 0, 0, 1, 2, 3, 4):
        guess = drafter.propose([7, 7], 100)
        lengths.append(len(guess))
        drafter.learn(len(guess), accepted)
    assert lengths == [8, 4, 2, 1, 1, 2, 4, 4]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 4), st.data())
def test_a_drafter_that_grows_with_its_sequence_guesses_as_a_fresh_one(
    tokens: list[int], ngram: int, data: st.DataObject
) -> None:
    grown = Drafter(Speculation(ngram, 6))
    for end in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=10))):
        assert grown.propose(tokens[:end], 6) == Drafter(Speculation(ngram, 6)).propose(tokens[:end], 6)


# -- verified by the model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
@pytest.mark.parametrize("right", [0, 1, 3, 5])
def test_of_a_guess_counts_what_the_model_would_have_chosen(tiny: LoadedModel, sampling: Sampling, right: int) -> None:
    """Guesses of five of which `right` are the answer's own; KV and answer are those without guesses."""
    reference, stand = Stand(tiny), Stand(tiny)
    ids = prompt(tiny, 30)
    plain, guessed = (s.admit(ids, max_tokens=sampling.max_tokens) for s in (reference, stand))
    plain.sampling = guessed.sampling = sampling
    reference.finish(plain)
    answer = reference.answer(plain)
    stand.feed(guessed, 30)
    steps = 0
    while guessed.finish_reason is None:
        known = len(guessed.tokens) - 30
        draft = answer[known : known + right] + [(t + 1) % 256 for t in answer[known + right : known + 5]]
        draft = draft[: len(answer) - known - 1]
        stand.step(Chunk(guessed, 1, tuple(draft)))
        steps += 1
    assert stand.answer(guessed) == answer
    assert steps == -(-(len(answer) - 1) // (right + 1))
    assert guessed.computed == plain.computed == len(guessed.tokens) - 1
    difference = relative_difference(stand.kv(guessed, guessed.computed), reference.kv(plain, plain.computed))
    assert difference <= 1e-5


def test_an_answer_ends_in_the_middle_of_a_guess_that_holds(tiny: LoadedModel) -> None:
    ids = prompt(tiny, 20)
    full = generate(tiny, ids, Sampling(max_tokens=30, ignore_eos=True))
    end = next(i for i in range(3, 30) if full[i] not in full[:i])
    stand = Stand(tiny)
    sequence = stand.admit(ids)
    sequence.sampling = Sampling(max_tokens=30, stop_token_ids=(full[end],))
    stand.feed(sequence, 20)
    gained = stand.engine.step([Chunk(sequence, 1, tuple(full[1:20]))])
    assert stand.answer(sequence) == full[: end + 1]
    assert [token.token_id for token in gained] == full[1 : end + 1]
    assert [token.finish_reason for token in gained] == [None] * (end - 1) + ["stop"]
    assert sequence.computed == len(sequence.tokens) - 1


# -- in the runner ---------------------------------------------------------------------------------------------


class Run:
    """What a runner did with some prompts side by side."""

    def __init__(
        self, loaded: LoadedModel, speculation: Speculation | None, prompts: list[list[int]], sampling: Sampling
    ) -> None:
        self.pool = BlockPool(loaded.config, 400)
        self.cache = BlockCache(self.pool, loaded.fingerprint)
        self.sequences: list[Sequence] = []
        self.answers = asyncio.run(
            self._run(EngineRunner(loaded, self.pool, cache=self.cache, speculation=speculation), prompts, sampling)
        )

    async def _run(self, runner: EngineRunner, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
        runner.start()
        answers = await asyncio.gather(*(self._one(runner, ids, sampling) for ids in prompts))
        await runner.close()
        self.cache.check_integrity()
        self.pool.check_integrity([self.cache.blocks])
        return answers

    async def _one(self, runner: EngineRunner, ids: list[int], sampling: Sampling) -> list[int]:
        sequence = runner.new_sequence(str(len(self.sequences)), ids, len(ids), sampling)
        self.sequences.append(sequence)
        answer = [(await runner.prefill(sequence)).token_id]
        async for token in runner.decode(sequence):
            assert token.position == len(ids) + len(answer)
            answer.append(token.token_id)
        return answer

    def kept(self) -> dict[bytes, torch.Tensor]:
        """KV of the cached full blocks, by name."""
        return {name: self.pool.storage[self.cache._cached[name].block] for name in self.cache.names}


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_with_guesses_answers_and_cache_are_those_without(repetitive: LoadedModel, sampling: Sampling) -> None:
    prompts = [prompt(repetitive, n) for n in (5, 33, 80)]
    plain = Run(repetitive, None, prompts, sampling)
    guessing = Run(repetitive, Speculation(ngram=2, draft=6), prompts, sampling)
    assert guessing.answers == plain.answers == [generate(repetitive, ids, sampling) for ids in prompts]
    accepted = sum(sequence.accepted for sequence in guessing.sequences)
    drafted = sum(sequence.drafted for sequence in guessing.sequences)
    assert 0 < accepted < drafted, "some guesses held, some failed: both paths were taken"
    kept, expected = guessing.kept(), plain.kept()
    assert kept.keys() == expected.keys()
    assert len(kept) >= sum((len(ids) + 119) // 16 for ids in prompts)
    for name, kv in kept.items():
        assert (kv - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max()


def test_guesses_take_no_memory_that_a_token_needs(repetitive: LoadedModel) -> None:
    """The pool has exactly the blocks of two answers; guesses would need one more now and then."""
    ids, sampling = prompt(repetitive, 16), Sampling(max_tokens=49, ignore_eos=True)
    pool = BlockPool(repetitive.config, 8)

    async def test() -> tuple[list[list[int]], int]:
        runner = EngineRunner(repetitive, pool, speculation=Speculation(ngram=1, draft=16))
        runner.start()
        sequences = [runner.new_sequence(name, ids, 16, sampling) for name in "ab"]

        async def answer(sequence: Sequence) -> list[int]:
            first = await runner.prefill(sequence)
            return [first.token_id, *[token.token_id async for token in runner.decode(sequence)]]

        answers = await asyncio.gather(*map(answer, sequences))
        await runner.close()
        return answers, sequences[0].accepted

    answers, accepted = asyncio.run(test())
    assert answers == [generate(repetitive, ids, sampling)] * 2
    assert accepted > 0
    pool.check_integrity([])


def test_a_stopped_sequence_has_delivered_all_that_it_holds(repetitive: LoadedModel) -> None:
    async def test() -> None:
        runner = EngineRunner(repetitive, BlockPool(repetitive.config, 100), speculation=Speculation(1, 8))
        runner.start()
        sequence = runner.new_sequence("a", prompt(repetitive, 40), 40, Sampling(max_tokens=600, ignore_eos=True))
        delivered = [(await runner.prefill(sequence)).token_id]
        decoding = runner.decode(sequence)
        async for token in decoding:
            delivered.append(token.token_id)
            if len(delivered) == 200:
                decoding.stop()
        assert delivered == sequence.tokens[40:]
        assert sequence.computed == len(sequence.tokens) - 1
        assert sequence.accepted > 0
        await runner.close()

    asyncio.run(test())


@pytest.mark.parametrize("values", [(0, 4), (3, 0)])
def test_impossible_settings_are_refused(values: Iterable[int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Speculation(*values)
