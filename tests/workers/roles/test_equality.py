"""P-RLD-MD answers exactly as one process decoding alone, and main decode holds the KV that the relay had.

Main decode sits behind a proxy that stands still at first, so that the relay decode really makes several tokens.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.workers.roles.steps import assert_same_kv, keep_kv
from tests.workers.serving import SlowWan, prompt_of, run
from workers.engine import Sampling, Sequence, generate
from workers.models import LoadedModel

LENGTHS = [1, 15, 16, 17, 500]


@pytest.mark.parametrize("length", LENGTHS)
def test_tiny_answers_as_alone_and_main_decode_recomputes_the_relays_kv(
    tiny: LoadedModel, tmp_path: Path, length: int
) -> None:
    prompt = prompt_of(length)
    expected = generate(tiny, prompt, Sampling(max_tokens=80))

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as lab:
            relayed, recomputed = keep_kv(lab.rld0), keep_kv(lab.md0)
            answer = await lab.complete_after_relay(prompt, 80, relayed=5)
            assert answer["pdd"]["token_ids"] == expected
            made_by = answer["pdd"]["instances"]
            switch = made_by.index("md0")
            assert made_by == ["rld0"] * switch + ["md0"] * (80 - switch)
            assert switch >= 5
            await lab.check_released()
            assert_same_kv(relayed[0][1], recomputed[0][1], length)

    run(test())


@pytest.mark.parametrize("length", LENGTHS)
def test_smollm2_answers_as_alone_and_main_decode_recomputes_the_relays_kv(
    smollm2: LoadedModel, tmp_path: Path, length: int
) -> None:
    prompt = prompt_of(length, smollm2.config.vocab)
    expected = generate(smollm2, prompt, Sampling(max_tokens=12, ignore_eos=True))

    async def test() -> None:
        async with SlowWan(smollm2, tmp_path, None, model={"name": "smollm2-135m"}) as lab:
            relayed, recomputed = keep_kv(lab.rld0), keep_kv(lab.md0)
            answer = await lab.complete_after_relay(prompt, 12, relayed=4, ignore_eos=True)
            assert answer["pdd"]["token_ids"] == expected
            made_by = answer["pdd"]["instances"]
            assert 4 <= made_by.count("rld0") < 12, "both made tokens"
            await lab.check_released()
            assert_same_kv(relayed[0][1], recomputed[0][1], length)

    run(test())


@pytest.mark.parametrize(("length", "block"), [(1, 0), (16, 0), (17, 0), (17, 1), *((100, b) for b in range(7))])
def test_the_equality_fails_when_any_one_block_is_zeroed_on_its_way(
    tiny: LoadedModel, tmp_path: Path, length: int, block: int
) -> None:
    prompt = prompt_of(length)
    expected = generate(tiny, prompt, Sampling(max_tokens=40))

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as lab:
            prefill = lab.p0.runner.prefill

            async def prefill_then_zero(sequence: Sequence, *more: Any) -> Any:
                first = await prefill(sequence, *more)
                view = lab.p0.pool.view(sequence.blocks[block], lab.p0.pool.block_size)
                view[:] = bytes(len(view))
                return first

            lab.p0.runner.prefill = prefill_then_zero
            answer = await lab.complete(prompt, 40)
            assert answer["pdd"]["token_ids"][0] == expected[0], "prefill's own token came before"
            assert answer["pdd"]["token_ids"] != expected

    run(test())


def test_only_token_ids_cross_for_generated_tokens(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={"handoff": "one-shot"}) as lab:
            answer = await lab.complete_after_relay(prompt_of(200), 100, relayed=20)
            await lab.check_released()
            relayed = answer["pdd"]["instances"].count("rld0")
            assert relayed >= 20
            prompt_kv = 200 * lab.p0.pool.bytes_per_token
            p0, rld0 = lab.p0.peers.local.counters, lab.rld0.peers.local.counters
            for peer in ("rld0", "md0"):
                assert prompt_kv < p0.bytes(peer, "sent", "kv") < prompt_kv * 1.01, "the prompt's KV once, no more"
                assert p0.bytes(peer, "sent", "token-ids") == 0
            assert rld0.bytes("md0", "sent", "kv") == 0
            ids_bytes = rld0.bytes("md0", "sent", "token-ids")
            assert relayed <= ids_bytes < 200 + 5 * relayed
            assert ids_bytes * 100 < relayed * lab.p0.pool.bytes_per_token, "against the KV of the same tokens"

    run(test())
