"""`kv_pool: {wan_dtype: fp8}`: eight-bit KV on the WAN and nowhere else. What it does to answers is for a benchmark."""

from pathlib import Path

import pytest

from tests.workers.serving import SlowWan, prompt_of, run
from workers.engine import Sampling, generate
from workers.models import LoadedModel


@pytest.mark.parametrize("kv_send", ["after-prefill", "chunked"])
def test_a_quarter_of_the_bytes_crosses_the_wan_and_the_fabric_has_all(
    tiny: LoadedModel, tmp_path: Path, kv_send: str
) -> None:
    prompt = prompt_of(500)
    expected = generate(tiny, prompt, Sampling(max_tokens=40, ignore_eos=True))

    async def test() -> None:
        serving = {"kv_pool": {"wan_dtype": "fp8"}, "kv_send": kv_send, "handoff": "one-shot"}
        async with SlowWan(tiny, tmp_path, None, serving=serving) as lab:
            answer = (await lab.complete_after_relay(prompt, 40, relayed=5, ignore_eos=True))["pdd"]
            record = answer["record"]
            relayed = answer["instances"].count("rld0")
            assert answer["token_ids"][: relayed + 1][:relayed] == expected[:relayed], "the relay's KV is exact"
            assert len(answer["token_ids"]) == 40
            assert record["pdd_kv_dtype"] == "fp8"
            assert record["pdd_fabric_bytes"] == 500 * 2048
            assert record["pdd_delta_bytes"] == 500 * (512 + 16)
            await lab.check_released(within_s=3)
            sent = lab.p0.counters.bytes("md0", "sent", "kv")
            assert sent < 0.27 * lab.p0.counters.bytes("rld0", "sent", "kv")
            # what follows finds it in main decode's cache, and main decode's own tokens are exact
            again = (await lab.complete([*prompt, *answer["token_ids"]], 5, ignore_eos=True))["pdd"]["record"]
            assert again["pdd_hit_rate"] > 0.9

    run(test())


def test_latent_attention_has_it_too(tiny_mla: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        serving = {"kv_pool": {"wan_dtype": "fp8"}, "pipeline": "cdc-pd"}
        async with SlowWan(tiny_mla, tmp_path, None, serving=serving, model={"name": "tiny-mla"}) as lab:
            record = (await lab.complete(prompt_of(100), 20))["pdd"]["record"]
            assert record["success"]
            assert record["pdd_delta_bytes"] < 0.3 * 100 * lab.p0.pool.bytes_per_token

    run(test())


def test_by_default_kv_is_sent_as_it_is(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={"pipeline": "cdc-pd"}) as lab:
            record = (await lab.complete(prompt_of(100), 5))["pdd"]["record"]
            assert (record["pdd_kv_dtype"], record["pdd_delta_bytes"]) == ("same", 100 * 2048)

    run(test())
