"""Log probabilities are there and the model's whoever makes a token, in whichever pipeline and mode of hand-over."""

from pathlib import Path
from typing import Any

import pytest

from tests.workers.gateway.test_openai_client import control, name
from tests.workers.serving import SlowWan, prompt_of, run
from workers.engine import Sampling
from workers.models import LoadedModel

TOKENS = 50
WAYS: dict[str, dict[str, Any]] = {
    "one-shot": {"handoff": "one-shot"},
    "catch-up": {"handoff": "catch-up"},
    "overlap": {"handoff": "overlap"},
    "kv": {"handoff": "kv"},
    "chunked": {"kv_send": "chunked"},
    "speculative": {"handoff": "one-shot", "speculative": {"ngram": 2, "draft": 4}},
    "cdc-pd": {"pipeline": "cdc-pd"},
    "idc-pd": {"pipeline": "idc-pd"},
    "prfaas": {"pipeline": "prfaas"},
    "single": {"pipeline": "single"},
}


@pytest.mark.parametrize("serving", WAYS.values(), ids=WAYS)
def test_every_token_has_the_models_log_probability(tiny: LoadedModel, tmp_path: Path, serving: dict[str, Any]) -> None:
    prompt = prompt_of(70)
    expected = control(tiny, prompt, Sampling(max_tokens=TOKENS, logprobs=2, ignore_eos=True))

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={"relay_threshold": 1, **serving}) as lab:
            ask = lab.complete if "pipeline" in serving else lab.complete_after_relay
            relayed = () if "pipeline" in serving else (5,)
            answer = await ask(prompt, TOKENS, *relayed, logprobs=2, ignore_eos=True)
            found = answer["choices"][0]["logprobs"]
            assert found["tokens"] == [name(tiny, token.token_id) for token in expected]
            assert found["token_logprobs"] == pytest.approx([token.logprob for token in expected], abs=1e-4)
            assert all(len(likeliest) == 2 for likeliest in found["top_logprobs"])

    run(test())
