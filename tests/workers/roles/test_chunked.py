"""`kv_send: chunked`: blocks are with the decode workers while prefill still computes, and nothing else changes."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.workers.serving import SlowWan, eventually, prompt_of, run
from workers.engine import Sampling, generate
from workers.models import LoadedModel

CHUNKED = {"kv_send": "chunked", "kv_chunk": 64}


class Turnstile:
    """Lets prefill's steps (256 tokens each) through one at a time, so that a test can look between them."""

    def __init__(self, lab: SlowWan) -> None:
        self._passes = threading.Semaphore(0)
        engine = lab.p0.runner._engine
        compute = engine.compute

        def wait_then_compute(batch: Any) -> Any:
            assert self._passes.acquire(timeout=30)
            return compute(batch)

        engine.compute = wait_then_compute

    def let_through(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._passes.release()


def held(worker: Any) -> int:
    """Blocks of the one request that a decode worker holds."""
    return next((active.held_blocks for active in worker.active.values()), 0)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 256, 500, 1000])
def test_answers_are_those_of_one_process_alone(tiny: LoadedModel, tmp_path: Path, length: int) -> None:
    prompt = prompt_of(length)
    expected = generate(tiny, prompt, Sampling(max_tokens=60))

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving=CHUNKED) as lab:
            answer = await lab.complete_after_relay(prompt, 60, relayed=5)
            assert answer["pdd"]["token_ids"] == expected
            assert {"rld0", "md0"} == set(answer["pdd"]["instances"])
            again = await lab.complete(prompt, 60)
            assert again["pdd"]["token_ids"] == expected, "from the caches"
            await lab.check_released()

    run(test())


def test_blocks_are_with_relay_and_main_decode_before_prefill_is_done_and_the_record_says_so(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    prompt = prompt_of(1000)
    expected = generate(tiny, prompt, Sampling(max_tokens=20))

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving=CHUNKED) as lab:
            turnstile = Turnstile(lab)
            asking = asyncio.create_task(lab.complete(prompt, 20))
            for step, blocks in ((1, 16), (2, 32), (3, 48)):
                turnstile.let_through()
                for worker in (lab.rld0, lab.md0):
                    await eventually(lambda w=worker, b=blocks: held(w) == b, 10, f"{blocks} blocks after step {step}")
            turnstile.let_through(1000)
            answer = await asking
            assert answer["pdd"]["token_ids"] == expected
            record = answer["pdd"]["record"]
            assert record["pdd_kv_send"] == "chunked"
            spans = {span["name"]: span for span in record["pdd_spans"]}
            for transfer in ("fabric-transfer", "wan-transfer"):
                assert spans[transfer]["chunks"] == 3
                assert spans[transfer]["bytes"] == 1000 * lab.p0.pool.bytes_per_token
                assert spans[transfer]["start_ns"] < spans["prefill"]["end_ns"] < spans[transfer]["end_ns"]
            assert record["pdd_kv_exposed_ms"] < record["pdd_kv_xfer_ms"]
            assert 0 < record["pdd_kv_wait_ms"] < record["pdd_kv_xfer_ms"]
            await lab.check_released()

    run(test())


def test_without_it_nothing_leaves_before_prefill_is_done(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as lab:
            turnstile = Turnstile(lab)
            asking = asyncio.create_task(lab.complete(prompt_of(1000), 5))
            turnstile.let_through(3)
            await eventually(lambda: any(a.sequence.computed == 768 for a in lab.p0.active.values()), 10, "3 steps")
            assert not lab.md0.active
            assert not lab.rld0.active
            turnstile.let_through(1000)
            assert (await asking)["pdd"]["record"]["pdd_kv_send"] == "after-prefill"

    run(test())


def test_what_prefill_has_cached_leaves_at_once(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving=CHUNKED) as lab:
            await lab.complete(prompt_of(320), 5)
            for name in ("rld0", "md0"):
                lab.p0.mirrors[name].apply([], [], reset=True)  # as if they had evicted it
            turnstile = Turnstile(lab)
            asking = asyncio.create_task(lab.complete([*prompt_of(320), *prompt_of(200, seed=1)], 5))
            await eventually(lambda: held(lab.md0) == 20, 10, "the cached prefix is there before any step")
            turnstile.let_through(1000)
            await asking

    run(test())


def test_a_connection_that_breaks_between_chunks_costs_only_what_had_not_arrived(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    prompt = prompt_of(1000)
    expected = generate(tiny, prompt, Sampling(max_tokens=20))

    async def test() -> None:
        serving = {**CHUNKED, "pipeline": "cdc-pd", "kv_pool": {"connections": 1}}
        async with SlowWan(tiny, tmp_path, None, serving=serving) as lab:
            turnstile = Turnstile(lab)
            channel = lab.p0.peers.pools["md0"]._idle[0]
            asking = asyncio.create_task(lab.complete(prompt, 20))
            turnstile.let_through(2)
            await eventually(lambda: held(lab.md0) == 32, 10, "two chunks are there")
            lab.wan.cut(channel.connection._stream._sock.getsockname()[1])
            await eventually(lambda: channel.connection.close_reason is not None, 10, "prefill sees it")
            turnstile.let_through(1000)
            answer = await asking
            assert answer["pdd"]["token_ids"] == expected
            record = answer["pdd"]["record"]
            assert record["pdd_kv_repairs"] == 1
            assert record["pdd_delta_bytes"] == (1000 - 32 * 16) * lab.p0.pool.bytes_per_token
            await lab.check_released()

    run(test())


def test_a_wrong_mirror_is_mended_while_prefill_computes(tiny: LoadedModel, tmp_path: Path) -> None:
    prompt = prompt_of(1000)
    expected = generate(tiny, prompt, Sampling(max_tokens=20))

    async def test() -> None:
        serving = {**CHUNKED, "pipeline": "cdc-pd"}
        async with SlowWan(tiny, tmp_path, None, serving=serving) as lab:
            await lab.complete(prompt_of(5, seed=9), 2)  # main decode has introduced its cache by then
            lab.p0.mirrors["md0"].apply(lab.p0.cache.hashes(prompt)[:10], [])  # a lie
            turnstile = Turnstile(lab)
            asking = asyncio.create_task(lab.complete(prompt, 20))
            turnstile.let_through(1)
            await eventually(lambda: held(lab.md0) == 16, 10, "mended by the first chunk")
            turnstile.let_through(1000)
            answer = await asking
            assert answer["pdd"]["token_ids"] == expected
            assert answer["pdd"]["record"]["pdd_kv_repairs"] == 1
            assert answer["pdd"]["record"]["pdd_delta_bytes"] == 1000 * lab.p0.pool.bytes_per_token

    run(test())


@pytest.mark.parametrize("steps", [0, 2])
def test_a_client_that_leaves_during_prefill_takes_what_has_been_sent_with_it(
    tiny: LoadedModel, tmp_path: Path, steps: int
) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving=CHUNKED) as lab:
            turnstile = Turnstile(lab)
            asking = asyncio.create_task(lab.complete(prompt_of(1000), 20))
            turnstile.let_through(steps)
            await eventually(lambda: bool(lab.p0.active) and held(lab.md0) == 16 * steps, 10, "under way")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            turnstile.let_through(1000)
            await lab.check_released(within_s=2)
            assert (await lab.complete(prompt_of(100), 5))["pdd"]["token_ids"]

    run(test())


@pytest.mark.parametrize("block", [0, 15, 16, 30])
def test_the_equality_fails_when_any_one_block_is_zeroed_where_it_arrived(
    tiny: LoadedModel, tmp_path: Path, block: int
) -> None:
    """So the blocks that came early are those that main decode uses."""
    prompt = prompt_of(500)
    expected = generate(tiny, prompt, Sampling(max_tokens=40))

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={**CHUNKED, "pipeline": "cdc-pd"}) as lab:
            begin = lab.md0.begin

            def begin_and_zero(message: Any) -> Any:
                incoming = begin(message)
                verified = incoming.verified

                def verified_then_zeroed(blocks: int) -> None:
                    verified(blocks)
                    active = lab.md0.active[message.spec.id]
                    if active.held_blocks > block:
                        view = lab.md0.pool.view(active.sequence.blocks[block], 16)
                        view[:] = bytes(len(view))

                incoming.verified = verified_then_zeroed
                return incoming

            lab.md0.begin = begin_and_zero
            answer = await lab.complete(prompt, 40)
            assert answer["pdd"]["token_ids"][0] == expected[0], "prefill's own token"
            assert answer["pdd"]["token_ids"] != expected

    run(test())
