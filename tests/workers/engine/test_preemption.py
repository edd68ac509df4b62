"""When memory runs out while several decode, the younger ones wait; all get what they would get alone."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.workers.engine.drive import prompt
from tests.workers.serving import SlowWan, prompt_of, run
from workers.cache import BlockCache
from workers.engine import BlockPool, EngineRunner, Job, OutOfBlocks, Sampling, Sequence, Speculation, generate
from workers.models import LoadedModel


def sampling(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, ignore_eos=True)


async def answer(runner: EngineRunner, sequence: Sequence) -> list[int]:
    try:
        first = await runner.prefill(sequence)
        rest = [token async for token in runner.decode(sequence)]
    finally:
        runner.free(sequence)  # as every role does, however a request ends
    assert [token.position for token in rest] == list(range(sequence.prompt_len + 1, len(sequence.tokens)))
    return [first.token_id, *(token.token_id for token in rest)]


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("speculation", [None, Speculation(2, 4)], ids=["a token a step", "speculative"])
def test_more_than_the_memory_holds_is_answered_one_after_the_other(
    tiny: LoadedModel, cached: bool, speculation: Speculation | None
) -> None:
    """Six answers of 5 blocks each, begun together in 16 blocks: two and a half of them fit."""
    pool = BlockPool(tiny.config, 16)
    cache = BlockCache(pool, tiny.fingerprint) if cached else None

    async def scenario() -> tuple[list[list[int]], list[Sequence]]:
        runner = EngineRunner(tiny, pool, cache=cache, speculation=speculation)
        runner.start()
        sequences = [runner.new_sequence(str(n), prompt(tiny, 20 + n), 20 + n, sampling(50)) for n in range(6)]
        answers = await asyncio.gather(*(answer(runner, sequence) for sequence in sequences))
        await runner.close()
        return answers, sequences

    answers, sequences = asyncio.run(scenario())
    for n, given in enumerate(answers):
        assert given == generate(tiny, prompt(tiny, 20 + n), sampling(50))
    assert sum(sequence.preempted for sequence in sequences) > 0
    assert sequences[0].preempted == 0, "the oldest never waits"
    if cache is not None:
        cache.check_integrity()
        assert cache.policy.pinned == 0
    pool.check_integrity([cache.blocks] if cache is not None else [])


def test_what_can_never_fit_fails_and_the_others_end(tiny: LoadedModel) -> None:
    pool = BlockPool(tiny.config, 6)

    async def scenario() -> None:
        runner = EngineRunner(tiny, pool)
        runner.start()
        endless = runner.new_sequence("endless", prompt(tiny, 30), 30, sampling(500))
        others = [runner.new_sequence(str(n), prompt(tiny, 20 + n), 20 + n, sampling(20)) for n in range(2)]
        results = await asyncio.gather(
            *(answer(runner, sequence) for sequence in (endless, *others)), return_exceptions=True
        )
        assert isinstance(results[0], OutOfBlocks)
        for n, given in enumerate(results[1:]):
            assert given == generate(tiny, prompt(tiny, 20 + n), sampling(20))
        await runner.close()

    asyncio.run(scenario())
    pool.check_integrity([])


def test_one_that_waits_for_memory_can_be_stopped_resumed_and_freed(tiny: LoadedModel) -> None:
    pool = BlockPool(tiny.config, 6)

    async def scenario() -> None:
        runner = EngineRunner(tiny, pool)
        runner.start()
        old, young, third = (
            runner.new_sequence(name, prompt(tiny, length), length, sampling(60))
            for name, length in (("old", 17), ("young", 18), ("third", 1))
        )
        for sequence in (old, young, third):
            await runner.prefill(sequence)
        jobs = [runner.decode(sequence) for sequence in (old, young, third)]
        streams = [asyncio.create_task(collect(job)) for job in jobs]
        while not (young.preempted and third.preempted):
            await asyncio.sleep(0)
        jobs[1].stop()
        stopped_at = len(young.tokens)
        runner.free(third)
        assert (await streams[1], await streams[2]) == (None, None)
        await streams[0]
        runner.free(old)
        assert old.tokens[17:] == generate(tiny, prompt(tiny, 17), sampling(60))
        assert (young.blocks, young.computed) == ([], 0)
        await collect(runner.decode(young))
        assert len(young.tokens) > stopped_at
        assert young.tokens[18:] == generate(tiny, prompt(tiny, 18), sampling(60))
        await runner.close()

    asyncio.run(scenario())
    pool.check_integrity([])


async def collect(job: Job) -> None:
    async for _ in job:
        pass


@pytest.mark.parametrize("seed", range(3))
def test_random_arrivals_departures_and_shortage_leave_every_answer_and_the_books_right(
    tiny: LoadedModel, seed: int
) -> None:
    chance = random.Random(seed)
    pool = BlockPool(tiny.config, 20)
    cache = BlockCache(pool, tiny.fingerprint, keeps_unfilled=chance.random() < 0.5)

    async def one(runner: EngineRunner, number: int) -> None:
        for _ in range(chance.randrange(10)):
            await asyncio.sleep(0)
        length, wanted = chance.randint(1, 30), chance.randint(1, 80)
        try:
            sequence = runner.new_sequence(str(number), prompt(tiny, length), length, sampling(wanted))
        except OutOfBlocks:
            return  # refused at the door
        given = [(await runner.prefill(sequence)).token_id]
        leaves_at = chance.choice([1, 5, 30, 100, 100, 100])
        async for token in runner.decode(sequence):
            given.append(token.token_id)
            if len(given) == leaves_at:
                break
        runner.free(sequence)
        expected = generate(tiny, prompt(tiny, length), sampling(wanted))
        assert given == expected[: len(given)]
        assert len(given) == min(leaves_at, wanted) or leaves_at == 1

    async def scenario() -> None:
        runner = EngineRunner(tiny, pool, cache=cache)
        runner.start()
        await asyncio.gather(*(one(runner, number) for number in range(16)))
        await runner.close()

    asyncio.run(scenario())
    cache.check_integrity()
    pool.check_integrity([cache.blocks])


def test_a_main_decode_without_room_for_all_answers_every_request_and_records_who_waited(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    """Six requests of up to 12 blocks each at once, and a main decode with 24 blocks; before, the last ones failed."""
    prompts = [prompt_of(40, seed=n) for n in range(6)]

    async def test() -> None:
        extra = {"md0": {"PDDBED_KV_BYTES": str(24 * 16 * 2048)}}
        async with SlowWan(tiny, tmp_path, None, extra=extra, serving={"pipeline": "cdc-pd"}) as lab:
            answers = await asyncio.gather(*(lab.complete(ids, 150, ignore_eos=True) for ids in prompts))
            for ids, given in zip(prompts, answers, strict=True):
                assert given["pdd"]["token_ids"] == generate(tiny, ids, sampling(150))
                assert set(given["pdd"]["instances"]) == {"md0"}
            assert sum(given["pdd"]["record"]["pdd_preemptions"] for given in answers) > 0
            await lab.check_released()

    run(test())
