"""A client that leaves takes everything with it, within a second, whatever the request was doing."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.workers.serving import SlowWan, eventually, prompt_of, run
from workers.engine import Sampling, generate
from workers.models import LoadedModel


async def leave_when(lab: SlowWan, stage: str, prompt: list[int], stream: bool) -> None:
    """Ask, wait until the request is at `stage`, hang up, and check that all is released within a second."""
    received: list[str] = []

    async def ask() -> None:
        body = {"prompt": prompt, "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "stream": stream}
        async with httpx.AsyncClient(base_url=lab.cluster.base_url, timeout=30) as http:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    received.append(line)

    at = {
        "prefill": lambda: bool(lab.p0.active) and lab.p0.pool.free_count < lab.p0.pool.num_blocks,
        "fabric transfer": lambda: (
            bool(lab.rld0.active) and not any(a.arrived.done() for a in lab.rld0.active.values())
        ),
        "relay": lambda: any(len(a.answer) > 5 for a in lab.rld0.active.values()),
        "hand-over": lambda: (
            any(a.asked_ns is not None and not a.following.relayed.over for a in lab.md0.active.values())
            and not lab.rld0.active
        ),
        "main decode": lambda: any(a.following.relayed.over and len(a.answer) > 20 for a in lab.md0.active.values()),
    }[stage]
    asking = asyncio.create_task(ask())
    await eventually(at, 10, f"the request reaches {stage}")
    asking.cancel()
    left = time.monotonic()
    await asyncio.gather(asking, return_exceptions=True)
    await lab.check_released(within_s=1.0)
    await eventually(lambda: not lab.cluster.gateway.dispatcher.live, 1.0, "the gateway forgets it, too")
    assert time.monotonic() - left < 1.0


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_during_prefill(tiny: LoadedModel, tmp_path: Path, stream: bool) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as lab:
            await leave_when(lab, "prefill", prompt_of(1000), stream)
            await lab.complete(prompt_of(20), 5)

    run(test())


def test_between_prefill_and_the_first_transfer(tiny: LoadedModel, tmp_path: Path) -> None:
    """The tasks that deliver are there and have not begun: they must not touch blocks that are given back already."""

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as lab:
            delivered = []
            deliver = lab.p0._deliver

            async def end_before_it_begins(active: Any, *rest: Any) -> None:
                lab.p0.release(active)
                delivered.append(await deliver(active, *rest))

            lab.p0._deliver = end_before_it_begins
            asking = asyncio.create_task(lab.complete(prompt_of(100), 5))
            await eventually(lambda: len(delivered) == 2, 5, "both deliveries end")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await lab.check_released(within_s=2)
            assert lab.p0.counters.bytes("md0", "sent", "kv") == 0

    run(test())


def test_during_the_transfer_over_the_fabric(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, 1e6) as lab:
            lab.fabric.rate_bytes_per_s = 200e3
            await leave_when(lab, "fabric transfer", prompt_of(1000), True)

    run(test())


def test_late_kv_of_a_request_that_is_gone_is_not_written_to_blocks_that_have_a_new_owner(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as lab:
            lab.fabric.rate_bytes_per_s = 300e3
            await leave_when(lab, "fabric transfer", prompt_of(1000), True)
            pool = lab.rld0.pool
            mine = pool.allocate(pool.num_blocks)
            pool.storage.fill_(7.0)
            before = lab.fabric.forwarded
            lab.fabric.rate_bytes_per_s = None
            await eventually(lambda: lab.fabric.forwarded > before + 100_000, 3, "the frame under way is finished")
            await asyncio.sleep(0.2)
            assert (pool.storage == 7.0).all()
            pool.release(mine)
            await lab.complete(prompt_of(20), 5)

    run(test())


def test_during_relay_decode(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, 200e3) as lab:
            await leave_when(lab, "relay", prompt_of(500), True)
            lab.wan.rate_bytes_per_s = None
            await lab.complete(prompt_of(20), 5)

    run(test())


def test_during_the_hand_over(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, 2e6, serving={"handoff": "one-shot"}) as lab:
            lab.ids.pause()
            await leave_when(lab, "hand-over", prompt_of(100), True)

    run(test())


def test_on_main_decode(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as lab:
            await leave_when(lab, "main decode", prompt_of(100), True)

    run(test())


def test_in_a_crowd_those_who_stay_are_answered_rightly_and_nothing_is_left(tiny: LoadedModel, tmp_path: Path) -> None:
    chance = random.Random(5)
    cases = []
    for seed, length in enumerate((1, 15, 16, 17, 100, 300)):
        prompt = prompt_of(length, seed=seed)
        cases.append((prompt, 20 + seed, generate(tiny, prompt, Sampling(max_tokens=20 + seed))))

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, 20e6) as lab:
            at_once = asyncio.Semaphore(10)
            answered: list[bool] = []

            async def one() -> None:
                async with at_once:
                    prompt, tokens, expected = chance.choice(cases)
                    asking = asyncio.create_task(lab.complete(prompt, tokens))
                    if chance.random() < 0.3:
                        await asyncio.wait([asking], timeout=chance.random() * 0.3)
                        asking.cancel()
                        await asyncio.gather(asking, return_exceptions=True)
                        return
                    answer = await asking
                    answered.append(answer["pdd"]["token_ids"] == expected)

            await asyncio.gather(*(one() for _ in range(80)))
            assert len(answered) > 40
            assert all(answered)
            await lab.check_released(within_s=2)
            assert all(not worker._tasks for worker in lab.workers), "no task is left behind"

    run(test())
