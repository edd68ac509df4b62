"""What goes wrong with one sequence of a step is that sequence's alone; a job that is stopped is that job alone."""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.engine.drive import prompt, repetitive_model
from tests.workers.serving import SlowWan, prompt_of, run
from workers.cache import BlockCache
from workers.engine import (
    BlockPool,
    Drafter,
    EngineFailed,
    EngineRunner,
    Sampling,
    Sequence,
    SequenceFailed,
    Speculation,
    generate,
)
from workers.models import LoadedModel

POISON = 7  # a token after which the models below compute no numbers
ODD = [*prompt_of(30, seed=5), POISON]


def greedy(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, ignore_eos=True)


def poisoned(loaded: LoadedModel, value: float) -> LoadedModel:
    """The same model, except that logits after POISON are all `value`."""
    model = loaded.model

    def spoilt(ids: Any, positions: Any, rows: Any, attention: Any) -> Any:
        logits = model(ids, positions, rows, attention).clone()
        logits[ids[rows] == POISON] = value
        return logits

    return dataclasses.replace(loaded, model=spoilt)


async def answer(runner: EngineRunner, sequence: Sequence, on_step: Callable[[], None] | None = None) -> list[int]:
    first = await runner.prefill(sequence, on_step)
    return [first.token_id, *[token.token_id async for token in runner.decode(sequence)]]


def breaks(target: Any, name: str, concerns: Callable[..., bool]) -> None:
    """A method raises whenever one sequence is among what it works on."""
    method = getattr(target, name)

    def broken(*arguments: Any) -> Any:
        if concerns(*arguments):
            raise ZeroDivisionError(f"a test's fault in {name}")
        return method(*arguments)

    setattr(target, name, broken)


def among(parts: Iterator[Any], sequence: Sequence) -> bool:
    return any(part.chunk.sequence is sequence for part in parts)


@pytest.mark.parametrize("stage", ["prepare", "compute", "sample", "commit", "on_step", "draft", "memory"])
def test_a_fault_of_one_sequence_ends_that_one_and_its_neighbours_are_answered_as_alone(
    tiny: LoadedModel, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = poisoned(repetitive_model(), float("nan")) if stage == "sample" else repetitive_model()
    ids = [prompt(loaded, 20 + n) for n in range(3)]

    async def scenario() -> None:
        pool = BlockPool(loaded.config, 200)
        cache = BlockCache(pool, loaded.fingerprint)
        runner = EngineRunner(loaded, pool, threads=1, cache=cache, speculation=Speculation(2, 4))
        runner.start()
        innocents = [runner.new_prompt(str(n), tokens, greedy(60)) for n, tokens in enumerate(ids)]
        odd = runner.new_prompt("odd", ODD, greedy(60))

        def bad_step() -> None:
            raise ZeroDivisionError("a test's fault in on_step")

        engine = runner._engine
        match stage:
            case "prepare":
                breaks(engine, "prepare", lambda chunk: chunk.sequence is odd)
            case "compute":
                breaks(engine, "compute", lambda batch: among(batch.parts, odd))
            case "commit":
                breaks(engine, "commit", lambda part, _: part.chunk.sequence is odd)
            case "memory":
                breaks(cache, "adopt", lambda tokens, *_: tokens is odd.tokens)
            case "draft":
                propose = Drafter.propose

                def bad(drafter: Drafter, tokens: list[int], at_most: int) -> list[int]:
                    if tokens is odd.tokens:
                        raise ZeroDivisionError("a test's fault in draft")
                    return propose(drafter, tokens, at_most)

                monkeypatch.setattr(Drafter, "propose", bad)
        tasks = [asyncio.create_task(answer(runner, sequence)) for sequence in innocents]
        with pytest.raises(SequenceFailed, match=r"cannot be computed: \w+Error|cannot be computed: BadLogits"):
            await answer(runner, odd, bad_step if stage == "on_step" else None)
        for tokens, task in zip(ids, tasks, strict=True):
            assert await task == generate(loaded, tokens, greedy(60))
        runner.free(odd)
        if stage not in ("draft", "on_step"):  # there its prompt was computed, and is right
            assert cache.policy.match(cache.hashes(ODD)) == 0, "nobody else finds what failed"
        await runner.close()
        cache.check_integrity()
        pool.check_integrity([cache.blocks])

    asyncio.run(scenario())


def test_an_engine_that_computes_nothing_says_that_it_is_not_the_sequences_fault(tiny: LoadedModel) -> None:
    async def scenario() -> None:
        runner = EngineRunner(tiny, BlockPool(tiny.config, 50), threads=1)
        runner.start()
        breaks(runner._engine, "compute", lambda batch: True)
        sequences = [runner.new_prompt(str(n), prompt(tiny, 20 + n), greedy(5)) for n in range(3)]
        results = await asyncio.gather(*(answer(runner, one) for one in sequences), return_exceptions=True)
        assert [type(result) for result in results] == [EngineFailed] * 3
        await runner.close()
        runner.pool.check_integrity([])

    asyncio.run(scenario())


def test_a_sequence_for_which_there_is_no_memory_to_compute_in_may_be_tried_elsewhere(tiny: LoadedModel) -> None:
    async def scenario() -> None:
        runner = EngineRunner(tiny, BlockPool(tiny.config, 50), threads=1)
        runner.start()
        large, other = (runner.new_prompt(name, prompt(tiny, 20 + len(name)), greedy(9)) for name in ("large", "a"))
        compute = runner._engine.compute

        def short(batch: Any) -> Any:
            if among(batch.parts, large):
                raise torch.OutOfMemoryError("a test has no memory")
            return compute(batch)

        runner._engine.compute = short  # type: ignore[method-assign]
        results = await asyncio.gather(answer(runner, large), answer(runner, other), return_exceptions=True)
        assert isinstance(results[0], EngineFailed)
        assert results[1] == generate(tiny, prompt(tiny, 21), greedy(9))
        await runner.close()

    asyncio.run(scenario())


def test_stopping_a_job_that_is_over_leaves_the_next_of_its_sequence_alone(tiny: LoadedModel) -> None:
    async def scenario() -> None:
        runner = EngineRunner(tiny, BlockPool(tiny.config, 50), threads=1)
        runner.start()
        sequence = runner.new_sequence("a", prompt(tiny, 20), 20, greedy(200))
        given = [(await runner.prefill(sequence)).token_id]
        past: list[Any] = []
        for wanted in itertools.count(2):
            job = runner.decode(sequence)
            for other in past:
                other.stop()  # before the first step of `job`
            async for token in job:
                given.append(token.token_id)
                for other in past:
                    other.stop()
                if len(given) == 10 * wanted:
                    job.stop()
            past.append(job)
            if sequence.finish_reason is not None:
                break
        assert given == generate(tiny, prompt(tiny, 20), greedy(200))
        await runner.close()

    asyncio.run(scenario())


# -- the whole relay ---------------------------------------------------------------------------------------------

EXTREMES: list[dict[str, Any]] = [
    *({"temperature": t} for t in (0, -0.0, 5e-324, 2.2e-308, 1e-310, 1e-300, 1e-5, 0.01, 2)),
    *({"temperature": t, "top_p": p} for t in (5e-324, 1e-310, 1, 2) for p in (5e-324, 1e-310, 1e-9, 1 - 2**-53, 1)),
    *({"temperature": 1.3, "seed": seed} for seed in (0, -1, 2**63 - 1, -(2**63))),
    *({"temperature": 2, "seed": 2**63 - 1, "n": 3}, {"temperature": 1e-310, "logprobs": 5}, {"logprobs": 0}),
    *({"temperature": t, "min_p": p} for t in (5e-324, 1, 2) for p in (5e-324, 1e-310, 1)),
    *({"temperature": t, "top_k": k} for t in (5e-324, 2) for k in (-1, 0, 1, 258, 2**31)),
    *({"min_tokens": n} for n in (0, 1, 12)),
    *({"repetition_penalty": r, "temperature": t} for r in (5e-324, 1e-310, 1e-38, 1e38, 1e308) for t in (1e-310, 2)),
    *({"presence_penalty": p, "frequency_penalty": p} for p in (-2, -0.0, 5e-324, 2)),
    *({"logit_bias": {str(n): b for n in range(258)}} for b in (-100, 5e-324, 100)),
    {"logit_bias": {"7": 100, "257": -100}, "repetition_penalty": 1e308, "frequency_penalty": 2, "min_tokens": 12},
    *({"temperature": 1, "stop_token_ids": [0, 2**32 - 1]}, {"max_tokens": 1}, {"stop": ["\x00", "zz"]}),
]


def test_no_value_of_a_sampling_field_touches_anybody_elses_answer(tiny: LoadedModel, tmp_path: Path) -> None:
    prompts = [prompt_of(40, seed=n) for n in range(3)]

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as lab:
            streams = [asyncio.create_task(lab.complete(ids, 400, ignore_eos=True)) for ids in prompts]
            odd = {"prompt": prompt_of(20, seed=9), "max_tokens": 12, "ignore_eos": True}
            for start in range(0, len(EXTREMES), 6):
                some = EXTREMES[start : start + 6]
                asked = [lab.http.post("/v1/completions", json=odd | fields) for fields in some]
                for fields, response in zip(some, await asyncio.gather(*asked), strict=True):
                    assert response.status_code == 200, (fields, response.text)
                    if fields.get("temperature", 1) <= 1e-5 and fields.keys().isdisjoint({"repetition_penalty"}):
                        expected = generate(tiny, prompt_of(20, seed=9), greedy(12))
                        assert response.json()["pdd"]["token_ids"] == expected, fields
            for ids, given in zip(prompts, await asyncio.gather(*streams), strict=True):
                assert given["pdd"]["token_ids"] == generate(tiny, ids, greedy(400))
            await lab.check_released()
            records = lab.records()
            assert len(records) == 3 + sum(fields.get("n", 1) for fields in EXTREMES)
            assert [record["pdd_recovery"] for record in records] == [[]] * len(records)

    run(test())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["the prompt", "the answer"])
def test_a_request_whose_logits_are_no_numbers_fails_and_is_asked_of_nobody_else(
    tiny: LoadedModel, tmp_path: Path, value: float, where: str
) -> None:
    loaded = poisoned(tiny, value)
    prompts = [prompt_of(40, seed=n) for n in range(3)]

    async def test() -> None:
        async with SlowWan(loaded, tmp_path, None) as lab:
            streams = [asyncio.create_task(lab.complete(ids, 200, ignore_eos=True)) for ids in prompts]
            await asyncio.sleep(0.2)
            if where == "the answer":  # somebody chooses POISON in the middle of it
                for worker in lab.workers:
                    poison_at(worker, prompt_of(30, seed=5), 10)
            odd = ODD if where == "the prompt" else prompt_of(30, seed=5)
            asked = [
                lab.http.post("/v1/completions", json={"prompt": odd, "max_tokens": 40, "ignore_eos": True})
                for _ in range(3)
            ]
            for response in await asyncio.gather(*asked):
                assert (response.status_code, response.json()["error"]["code"]) == (500, "computation_failed")
            for ids, given in zip(prompts, await asyncio.gather(*streams), strict=True):
                assert given["pdd"]["token_ids"] == generate(tiny, ids, greedy(200))
                assert given["pdd"]["record"]["pdd_recovery"] == []
            await lab.check_released()
            records = lab.records()
            failed = [record for record in records if not record["success"]]
            assert [(one["pdd_replays"], one["pdd_recovery"]) for one in failed] == [(0, [])] * 3

    run(test())


def poison_at(worker: Any, prompt: list[int], index: int) -> None:
    """The answer's token at `index` becomes POISON, for one prompt."""
    engine = worker.runner._engine
    commit = engine.commit

    def other(part: Any, sampled: Any) -> Any:
        sequence = part.chunk.sequence
        if sequence.tokens[: sequence.prompt_len] == prompt:
            sampled = [
                one._replace(token=POISON) if row.position == len(prompt) + index and hasattr(one, "token") else one
                for one, row in zip(sampled, part.requests, strict=True)
            ]
        return commit(part, sampled)

    engine.commit = other


@pytest.mark.parametrize("where", ["prefill", "gateway"])
def test_a_message_that_nobody_can_deal_with_costs_its_request_and_no_connection(
    tiny: LoadedModel, tmp_path: Path, where: str
) -> None:
    prompts = [prompt_of(40, seed=n) for n in range(3)]

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as lab:
            dispatcher = lab.cluster.gateway.dispatcher
            links = [dispatcher.peers.link(name) for name in ("p0", "rld0", "md0")]
            if where == "prefill":
                breaks(lab.p0, "new_prefilling", lambda spec: spec.prompt == ODD)
            else:
                breaks(dispatcher, "_take", lambda request, *_: request.spec.prompt == ODD)
            streams = [asyncio.create_task(lab.complete(ids, 200, ignore_eos=True)) for ids in prompts]
            await asyncio.sleep(0.1)
            response = await lab.http.post("/v1/completions", json={"prompt": ODD, "max_tokens": 5})
            assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
            for ids, given in zip(prompts, await asyncio.gather(*streams), strict=True):
                assert given["pdd"]["token_ids"] == generate(tiny, ids, greedy(200))
                assert given["pdd"]["record"]["pdd_recovery"] == []
            assert [dispatcher.peers.link(name) for name in ("p0", "rld0", "md0")] == links
            await lab.check_released(within_s=5)

    run(test())
