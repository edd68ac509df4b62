"""A model with the latent cache through the whole relay: P, RLD and MD, its KV over the wire, ids at the hand-over."""

from pathlib import Path
from typing import Any

import pytest

from tests.workers.serving import SlowWan, prompt_of, run
from workers.engine import Sampling, Sequence, generate
from workers.models import LoadedModel

MODEL = {"name": "tiny-mla"}


@pytest.mark.parametrize("length", [16, 250])
def test_it_answers_across_the_relay_as_alone_and_the_next_turn_finds_its_latents(
    tiny_mla: LoadedModel, tmp_path: Path, length: int
) -> None:
    prompt = prompt_of(length)
    expected = generate(tiny_mla, prompt, Sampling(max_tokens=60, ignore_eos=True))

    async def test() -> None:
        async with SlowWan(tiny_mla, tmp_path, None, model=MODEL) as lab:
            answer = await lab.complete_after_relay(prompt, 60, relayed=5, ignore_eos=True)
            assert answer["pdd"]["token_ids"] == expected
            assert {"rld0", "md0"} == set(answer["pdd"]["instances"])
            kv_bytes = lab.p0.peers.local.counters.bytes("md0", "sent", "kv")
            latents = length * 4 * (48 + 16) * 4
            assert latents < kv_bytes < latents + 4096
            await lab.check_released()

            following = prompt + expected + prompt_of(20, seed=2)
            again = await lab.complete(following, 30, ignore_eos=True)
            assert again["pdd"]["token_ids"] == generate(tiny_mla, following, Sampling(max_tokens=30, ignore_eos=True))
            assert lab.md0.cache.policy.size >= (length + 60) // 16
            await lab.check_released()

    run(test())


def test_a_latent_zeroed_on_its_way_changes_the_answer(tiny_mla: LoadedModel, tmp_path: Path) -> None:
    prompt = prompt_of(60)
    expected = generate(tiny_mla, prompt, Sampling(max_tokens=40, ignore_eos=True))

    async def test(block: int) -> None:
        async with SlowWan(tiny_mla, tmp_path, None, model=MODEL) as lab:
            prefill = lab.p0.runner.prefill

            async def prefill_then_zero(sequence: Sequence, *more: Any) -> Any:
                first = await prefill(sequence, *more)
                view = lab.p0.pool.view(sequence.blocks[block], lab.p0.pool.block_size)
                view[:] = bytes(len(view))
                return first

            lab.p0.runner.prefill = prefill_then_zero  # type: ignore[method-assign]
            answer = await lab.complete(prompt, 40, ignore_eos=True)
            assert answer["pdd"]["token_ids"][0] == expected[0]
            assert answer["pdd"]["token_ids"] != expected

    for block in range(4):
        run(test(block))
