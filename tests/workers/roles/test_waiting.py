"""What waits at a worker: for a beginning that another request is computing, and for memory. Neither is a loss."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from experiments.sim.state import SimCache
from tests.workers.roles.steps import fail_at_next_step
from tests.workers.serving import TWO_OF_EACH, SlowWan, eventually, prompt_of, run
from workers.cache import BlockCache
from workers.engine import BlockPool, EngineRunner, Profile, Sampling, generate
from workers.models import LoadedModel

BLOCK = 16
BYTES = BLOCK * 2048  # of a block of `tiny`
LONG = prompt_of(2960)
FAST = json.dumps({"name": "fast", "prefill_token_ns": 20_000, "decode_step_ns": 200_000, "extend_token_ns": 20_000})


def greedy(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, ignore_eos=True)


async def prefilled(
    loaded: LoadedModel, blocks: int, prompts: list[list[int]], profile: Profile | None = None
) -> list[int]:
    """The number of tokens that each of several prompts at once found in the cache."""
    pool = BlockPool(loaded.config, blocks)
    runner = EngineRunner(loaded, pool, threads=1, cache=BlockCache(pool, loaded.fingerprint), profile=profile)
    runner.start()
    sequences = [runner.new_prompt(str(number), ids, greedy(1)) for number, ids in enumerate(prompts)]
    await asyncio.gather(*(runner.prefill(sequence) for sequence in sequences))
    await runner.close()
    return [sequence.cached for sequence in sequences]


# -- a beginning that another request computes ---------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", ["pdd", "single"])
@pytest.mark.parametrize("profile", [None, FAST], ids=["native", "paced"])
def test_identical_prompts_at_once_are_computed_once(
    tiny: LoadedModel, tmp_path: Path, pipeline: str, profile: str | None
) -> None:
    expected = generate(tiny, LONG, greedy(2))

    async def test() -> None:
        extra = {} if profile is None else {"p0": {"PDDBED_PROFILE": profile}}
        async with SlowWan(tiny, tmp_path, None, serving={"pipeline": pipeline}, extra=extra) as lab:
            answers = await asyncio.gather(*(lab.complete(LONG, 2, ignore_eos=True) for _ in range(8)))
            assert [given["pdd"]["token_ids"] for given in answers] == [expected] * 8
            hits = sorted(record["pdd_p_hit"] for record in await lab.settled())
            assert hits == [0.0] + [2959 / 2960] * 7, "what really was in the cache is what is recorded"
            await lab.check_released(within_s=5)

    run(test())


def test_of_two_prefills_one_computes_what_identical_prompts_at_once_need(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, hosts=TWO_OF_EACH) as lab:
            await asyncio.gather(*(lab.complete(LONG[:800], 2, ignore_eos=True) for _ in range(4)))
            records = await lab.settled()
            assert sorted(record["pdd_p_hit"] for record in records) == [0.0] + [799 / 800] * 3
            assert len({record["pdd_prefill"] for record in records}) == 1

    run(test())


def test_prompts_at_once_find_what_they_would_find_one_after_the_other(tiny: LoadedModel) -> None:
    """A tree of prompts, as agents make it, all at once, against the simulator's cache in their order."""
    chance = random.Random(3)
    prompts: list[list[int]] = []
    for number in range(40):
        known = chance.choice(prompts)[: chance.randrange(600)] if prompts and chance.random() < 0.8 else []
        prompts.append([*known, *prompt_of(chance.randrange(1, 120), seed=1000 + number)])
    simulated = SimCache(BLOCK)
    expected = []
    for ids in prompts:
        path = [hash(tuple(ids[: end + BLOCK])) for end in range(0, len(ids) - BLOCK + 1, BLOCK)]
        expected.append(min(simulated.matched(path), len(ids) - 1) // BLOCK)
        simulated.keep(path)

    assert [tokens // BLOCK for tokens in run(prefilled(tiny, 2000, prompts))] == expected
    assert sum(expected) > 100


@pytest.mark.parametrize("end", ["leaves", "fails"])
def test_when_the_first_of_several_ends_early_the_next_computes_what_is_lacking(
    tiny: LoadedModel, tmp_path: Path, end: str
) -> None:
    expected = generate(tiny, LONG, greedy(2))

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as lab:
            first = asyncio.create_task(lab.complete(LONG, 2, ignore_eos=True))
            await eventually(lambda: bool(lab.p0.active), 5, "it is there")
            (active,) = lab.p0.active.values()
            others = [asyncio.create_task(lab.complete(LONG, 2, ignore_eos=True)) for _ in range(3)]
            await eventually(lambda: len(lab.p0.active) == 4 and active.sequence.computed > 300, 10, "they wait")
            if end == "leaves":
                dispatcher = lab.cluster.gateway.dispatcher
                dispatcher.live.cancel(
                    dispatcher.live[active.spec.id], "the client has gone"
                )  # at once, whatever HTTP takes
                first.cancel()
            else:
                fail_at_next_step(lab.p0, active.sequence)
            await asyncio.gather(first, return_exceptions=True)
            assert end == "leaves" or "computation_failed" in str(first.exception())
            for given in await asyncio.gather(*others):
                assert given["pdd"]["token_ids"] == expected
            hits = sorted(record["pdd_p_hit"] for record in await lab.settled() if record["success"])
            assert hits[1:] == [2959 / 2960] * 2
            assert hits[0] > 0 if end == "leaves" else hits[0] == 0, "what was computed by then, unless it failed"

    run(test())


def test_a_paced_queue_hits_as_the_simulator_says(tiny: LoadedModel) -> None:
    """Paced prompts are computed one after the other; the second of each pair finds the first."""
    prompts = [prompt_of(200, seed=number // 2) for number in range(6)]
    profile = Profile("fast", 20_000, 200_000, 20_000)
    assert run(prefilled(tiny, 400, prompts, profile)) == [0, 192, 0, 192, 0, 192]


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipeline", "small", "makers", "chunked"),
    [
        ("cdc-pd", "md0", {"md0"}, False),
        ("cdc-pd", "md0", {"md0"}, True),
        ("cdc-pd", "p0", {"md0"}, False),
        ("pdd", "md0", {"rld0", "md0"}, False),
        ("pdd", "rld0", {"rld0", "md0"}, False),
        ("pdd", "rld0", {"rld0", "md0"}, True),
        ("idc-pd", "rld0", {"rld0"}, False),
        ("single", "p0", {"p0"}, False),
    ],
)
def test_requests_wait_for_a_worker_without_room_and_the_pipeline_is_the_one_recorded(
    tiny: LoadedModel, tmp_path: Path, pipeline: str, small: str, makers: set[str], chunked: bool
) -> None:
    """24 requests of up to 9 blocks at once, and a worker with room for two or three of them."""
    prompts = [prompt_of(100 + number % 3, seed=number) for number in range(24)]
    serving = {"pipeline": pipeline, **({"kv_send": "chunked", "kv_chunk": 32} if chunked else {})}

    async def test() -> None:
        extra = {small: {"PDDBED_KV_BYTES": str(24 * BYTES)}}
        async with SlowWan(tiny, tmp_path, None, extra=extra, serving=serving) as lab:
            answers = await asyncio.gather(*(lab.complete(ids, 40, ignore_eos=True) for ids in prompts))
            for ids, given in zip(prompts, answers, strict=True):
                assert given["pdd"]["token_ids"] == generate(tiny, ids, greedy(40))
                assert set(given["pdd"]["instances"]) <= makers
            told = await lab.settled()
            assert [record["pdd_recovery"] for record in told] == [[]] * 24
            assert {record["pdd_replays"] for record in told} == {0}
            if small != "p0":
                assert max(record["pdd_memory_wait_ms"] for record in told) > 0
            await lab.check_released(within_s=5)

    run(test())


def test_one_that_leaves_while_it_waits_for_room_gives_its_place_to_the_next(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        extra = {"md0": {"PDDBED_KV_BYTES": str(20 * BYTES)}}
        async with SlowWan(tiny, tmp_path, None, extra=extra, serving={"pipeline": "cdc-pd"}) as lab:
            first = asyncio.create_task(lab.complete(prompt_of(200, seed=1), 100, ignore_eos=True))
            await eventually(lambda: bool(lab.md0.active), 10, "it decodes")
            second = asyncio.create_task(lab.complete(prompt_of(150, seed=2), 40, ignore_eos=True))
            await eventually(lambda: len(lab.md0.room.waiting) == 1, 10, "another one waits")
            third = asyncio.create_task(lab.complete(prompt_of(60, seed=3), 40, ignore_eos=True))
            await eventually(lambda: len(lab.md0.room.waiting) == 2, 10, "and one behind it")
            second.cancel()
            await eventually(lambda: len(lab.md0.room.waiting) < 2, 10, "it has left")
            assert (await third)["pdd"]["token_ids"] == generate(tiny, prompt_of(60, seed=3), greedy(40))
            assert (await first)["pdd"]["token_ids"] == generate(tiny, prompt_of(200, seed=1), greedy(100))
            await eventually(lambda: not lab.p0.active and not lab.md0.active, 10, "all is over")
            assert not lab.md0.room.waiting
            await lab.check_released()

    run(test())


def test_a_prefill_that_is_cut_off_while_its_request_waits_for_room_tries_again(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    """The word that there is room may be lost with the connection."""

    async def test() -> None:
        extra = {"md0": {"PDDBED_KV_BYTES": str(20 * BYTES)}}
        async with SlowWan(tiny, tmp_path, None, extra=extra, serving={"pipeline": "cdc-pd"}) as lab:
            first = asyncio.create_task(lab.complete(prompt_of(200, seed=1), 100, ignore_eos=True))
            await eventually(lambda: bool(lab.md0.active), 10, "it decodes")
            second = asyncio.create_task(lab.complete(prompt_of(150, seed=2), 40, ignore_eos=True))
            await eventually(lambda: len(lab.md0.room.waiting) == 1, 10, "another one waits")
            lab.wan.cut()
            assert (await second)["pdd"]["token_ids"] == generate(tiny, prompt_of(150, seed=2), greedy(40))
            await first
            await lab.check_released(within_s=5)

    run(test())
