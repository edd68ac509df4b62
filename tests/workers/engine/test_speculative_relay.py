"""Speculative decoding on main decode, behind the relay and with the DRC: the answer is the control's, and so is what
main decode keeps for the next turn.
"""

from pathlib import Path

import pytest
import torch

from tests.workers.engine.drive import Stand, repetitive_model
from tests.workers.serving import SlowWan, prompt_of, run
from workers.engine import Sampling, generate
from workers.models import LoadedModel

ANSWER = 150


@pytest.fixture(scope="module")
def repetitive() -> LoadedModel:
    return repetitive_model()


def control_kv(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """KV of `tokens` from one process, a token a step."""
    stand = Stand(loaded)
    sequence = stand.admit(tokens, max_tokens=1)
    stand.feed(sequence, 1)
    return stand.kv(sequence, len(tokens))


@pytest.mark.parametrize(("handoff", "temperature"), [("one-shot", 0), ("catch-up", 0.3), ("overlap", 0.3)])
def test_answers_and_cache_are_those_of_one_token_a_step(
    repetitive: LoadedModel, tmp_path: Path, handoff: str, temperature: float
) -> None:
    prompt = prompt_of(70)
    sampling = Sampling(max_tokens=ANSWER, temperature=temperature, seed=5, ignore_eos=True)
    expected = generate(repetitive, prompt, sampling)
    serving = {"handoff": handoff, "speculative": {"ngram": 2, "draft": 6}}

    async def test() -> None:
        async with SlowWan(repetitive, tmp_path, None, serving=serving) as lab:
            fields = {"temperature": temperature, "seed": 5, "ignore_eos": True}
            answer = await lab.complete_after_relay(prompt, ANSWER, relayed=5, **fields)
            assert answer["pdd"]["token_ids"] == expected
            await lab.check_released()
            record = answer["pdd"]["record"]
            assert 0 < record["pdd_accepted_tokens"] <= record["pdd_drafted_tokens"]
            assert record["pdd_accepted_tokens"] < record["pdd_md_tokens"]
            spans = {span["name"]: span for span in record["pdd_spans"]}
            assert "drafted" not in spans["relay-decode"], "only main decode guesses"
            assert spans["main-decode"]["accepted"] == record["pdd_accepted_tokens"]

            tokens = prompt + expected
            names = lab.md0.cache.hashes(tokens[:-1])
            assert set(names) == set(lab.md0.cache.names), "the answer's blocks, and no others"
            kv = control_kv(repetitive, tokens[:-1])
            for index, name in enumerate(names):
                kept = lab.md0.pool.storage[lab.md0.cache._cached[name].block]
                assert (kept - kv[16 * index : 16 * (index + 1)]).abs().max() <= 1e-5 * kv.abs().max()

            again = await lab.complete([*tokens, *prompt_of(10, seed=3)], 20, ignore_eos=True)
            assert again["pdd"]["token_ids"] == generate(
                repetitive, [*tokens, *prompt_of(10, seed=3)], Sampling(max_tokens=20, ignore_eos=True)
            )
            assert again["pdd"]["record"]["pdd_md_hit"] == pytest.approx(16 * len(names) / (len(tokens) + 10))

    run(test())
