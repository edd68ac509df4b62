"""The gateway knows the caches by their notices: it takes the short pipeline when main decode holds the prompt, and the
workers that hold it when there are several.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from tests.workers.serving import SlowWan, eventually, prompt_of, run
from workers.engine import Sampling, generate
from workers.local import InProcessCluster, Layout
from workers.models import LoadedModel
from workers.policy import WorkerView


def test_a_known_prompt_skips_the_relay_and_the_record_says_why(tiny: LoadedModel, tmp_path: Path) -> None:
    prompt = prompt_of(500)
    expected = generate(tiny, prompt, Sampling(max_tokens=20))

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, 20e6) as lab:
            first = await lab.complete(prompt, 20)
            await lab.check_released(within_s=3)
            again = await lab.complete(prompt, 20)
            await lab.check_released(within_s=3)
            other = await lab.complete([*prompt[:400], *prompt_of(100, seed=9)], 20)
            await lab.check_released(within_s=3)
        for answer in (first, again):
            assert answer["pdd"]["token_ids"] == expected
        records = [answer["pdd"]["record"] for answer in (first, again, other)]
        assert [record["pdd_pipeline"] for record in records] == ["p-rld-md", "p-md", "p-rld-md"]
        assert records[1]["pdd_route_reason"] == "hit rate 99.2% is above 95.0%"
        assert [record["pdd_hit_rate"] for record in records] == [0, 496 / 500, 400 / 500]
        assert again["pdd"]["instances"] == ["md0"] * 20
        details = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, again, other)]
        assert details == [0, 499, 400]

    run(test())


def test_a_conversation_stays_with_the_workers_that_hold_it(tiny: LoadedModel, tmp_path: Path) -> None:
    """By load alone a tie is decided by name, and the second turn would go elsewhere."""
    hosts = (
        ("gw0", "gateway", "main"),
        *((f"p{n}", "prefill", "main") for n in range(2)),
        *((f"rld{n}", "relay-decode", "main") for n in range(2)),
        *((f"md{n}", "main-decode", "remote") for n in range(3)),
    )

    async def test() -> None:
        async with (
            InProcessCluster(tiny, Layout(hosts=hosts), tmp_path) as cluster,
            httpx.AsyncClient(base_url=cluster.base_url, timeout=30) as http,
        ):
            dispatcher = cluster.gateway.dispatcher

            async def ask(prompt: list[int]) -> dict[str, Any]:
                response = await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 20})
                assert response.status_code == 200, response.text
                await eventually(lambda: not dispatcher.live, 3, "settled")
                record: dict[str, Any] = response.json()["pdd"]["record"]
                record["ids"] = response.json()["pdd"]["token_ids"]
                return record

            views = dispatcher.router._views
            others = {"p0", "rld0", "md0", "md1"}

            def busy(*asked: Any) -> list[WorkerView]:
                return [replace(view, active=view.active + (view.name in others)) for view in views(*asked)]

            dispatcher.router._views = busy  # type: ignore[method-assign]
            first = await ask(prompt_of(320))
            dispatcher.router._views = views  # type: ignore[method-assign]
            assert (first["pdd_prefill"], first["pdd_relay"], first["pdd_main"]) == ("p1", "rld1", "md2")
            second = await ask([*prompt_of(320), *first["ids"], *prompt_of(100, seed=1)])
            assert (second["pdd_prefill"], second["pdd_relay"], second["pdd_main"]) == ("p1", "rld1", "md2")
            elsewhere = await ask(prompt_of(320, seed=5))
            assert (elsewhere["pdd_prefill"], elsewhere["pdd_main"]) == ("p0", "md0")

    run(test())


def test_a_restarted_gateway_link_learns_the_caches_again(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as lab:
            await lab.complete(prompt_of(200), 5)
            await lab.check_released(within_s=3)
            dispatcher = lab.cluster.gateway.dispatcher
            known = len(dispatcher.router.mirrors["md0"])
            assert known == len(lab.md0.cache.names) == 12
            link = dispatcher.peers.link("md0")
            assert link is not None
            link.close("cut by the test")
            await eventually(lambda: len(dispatcher.router.mirrors["md0"]) == 0, 2, "what it said no longer holds")
            await eventually(lambda: len(dispatcher.router.mirrors["md0"]) == known, 3, "said again")

    run(test())
