"""The baselines `prfaas` and `single`, and several workers of each role at once: answers are those of one process."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.workers.serving import TWO_OF_EACH, SlowWan, eventually, prompt_of, run
from workers.engine import Sampling, generate
from workers.local import InProcessCluster, Layout
from workers.models import LoadedModel


def test_prfaas_sends_long_uncached_prompts_to_prefill_and_keeps_the_others(tiny: LoadedModel, tmp_path: Path) -> None:
    short, long = prompt_of(100), prompt_of(300, seed=1)
    turn = [*long, *prompt_of(90, seed=2)]
    expected = [generate(tiny, prompt, Sampling(max_tokens=30)) for prompt in (short, long, turn)]

    async def test() -> None:
        serving = {"pipeline": "prfaas", "offload_threshold": 128}
        async with SlowWan(tiny, tmp_path, None, serving=serving) as lab:
            answers = []
            for prompt in (short, long, turn):
                answers.append((await lab.complete(prompt, 30))["pdd"])
                await lab.check_released(within_s=3)
            assert [answer["token_ids"] for answer in answers] == expected
            assert all(set(answer["instances"]) == {"md0"} for answer in answers)
            records = [answer["record"] for answer in answers]
            assert [record["pdd_pipeline"] for record in records] == ["md", "p-md", "md"]
            assert [record["pdd_delta_bytes"] for record in records] == [None, 300 * 2048, None]
            assert records[2]["pdd_route_reason"].startswith("102 uncached tokens are not above 128")
            assert records[2]["pdd_hit_rate"] == 288 / 390
            assert [record["pdd_md_tokens"] for record in records] == [30, 30, 30]
            sent = lab.p0.counters.bytes("md0", "sent", "kv")
            assert 300 * 2048 < sent < 301 * 2048, "only the long one crossed"

    run(test())


def test_single_is_one_process(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={"pipeline": "single"}) as lab:
            answer = (await lab.complete(prompt_of(200), 30))["pdd"]
            assert answer["token_ids"] == generate(tiny, prompt_of(200), Sampling(max_tokens=30))
            assert set(answer["instances"]) == {"p0"}
            assert answer["record"]["pdd_pipeline"] == "p"
            await lab.check_released(within_s=3)

    run(test())


@pytest.mark.parametrize("kv_send", ["after-prefill", "chunked"])
@pytest.mark.parametrize("pipeline", ["pdd", "cdc-pd", "idc-pd", "prfaas"])
def test_two_of_each_role_share_the_load_and_every_answer_is_right(
    tiny: LoadedModel, tmp_path: Path, pipeline: str, kv_send: str
) -> None:
    prompts = [prompt_of(30 + 45 * index, seed=index) for index in range(8)]
    prompts += [[*prompt, *prompt_of(40, seed=100 + index)] for index, prompt in enumerate(prompts)]
    expected = [generate(tiny, prompt, Sampling(max_tokens=20)) for prompt in prompts]

    async def test() -> None:
        serving = {"pipeline": pipeline, "kv_send": kv_send, "kv_chunk": 32, "offload_threshold": 128}
        async with (
            InProcessCluster(tiny, Layout(hosts=TWO_OF_EACH, serving=serving), tmp_path) as cluster,
            httpx.AsyncClient(base_url=cluster.base_url, timeout=60) as http,
        ):

            async def ask(prompt: list[int]) -> dict[str, Any]:
                body = {"prompt": prompt, "max_tokens": 20, "temperature": 0}
                response = await http.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text
                answer: dict[str, Any] = response.json()["pdd"]
                return answer

            answers = []
            for half in (prompts[:8], prompts[8:]):  # the second half continues the first
                answers += await asyncio.gather(*(ask(prompt) for prompt in half))
                await eventually(lambda: not cluster.gateway.dispatcher.live, 10, "settled")
            assert [answer["token_ids"] for answer in answers] == expected
            records = [answer["record"] for answer in answers]
            for role in ("pdd_prefill", "pdd_relay", "pdd_main"):
                names = {record[role] for record in records} - {None}
                assert names == set() or len(names) >= 2, f"{role} is always {names}"
            for first, second in zip(records[:8], records[8:], strict=True):
                # where a conversation was decoded, its next turn is decoded, unless that worker has too much to do
                if first["pdd_main"] == second["pdd_main"] is not None:
                    assert second["pdd_hit_rate"] > 0 or first["input_len"] < 16
            workers = [cluster.worker(name) for name, role, _ in TWO_OF_EACH if role != "gateway"]
            for worker in workers:
                await eventually(lambda w=worker: not w.active and w.cache.policy.pinned == 0, 3, "released")
                worker.cache.check_integrity()
                worker.pool.check_integrity(holders=[worker.cache.blocks])

    run(test())
