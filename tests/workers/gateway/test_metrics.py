"""/metrics: a strict reader of the exposition format finds in it what the requests were."""

import asyncio
import math
import re
from pathlib import Path

from tests.workers.serving import SlowWan, eventually, prompt_of, run
from workers.gateway.metrics import SECONDS
from workers.models import LoadedModel

SAMPLE = re.compile(
    r'^(?P<name>[a-z_0-9]+)(?:\{(?P<labels>[a-z_]+="[^"\\\n]*"(?:,[a-z_]+="[^"\\\n]*")*)\})? (?P<value>\S+)$'
)


def parse(text: str) -> dict[str, float]:
    """Samples by name and labels as written. Asserts the format: every sample typed, none twice."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds, f"{name} is typed twice"
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            match = SAMPLE.match(line)
            assert match, line
            name = match["name"]
            family = name if name in kinds else re.sub(r"_(bucket|sum|count)$", "", name)
            assert kinds[family] == ("histogram" if family != name else kinds[name])
            key = name + (f"{{{match['labels']}}}" if match["labels"] else "")
            assert key not in found, f"{key} is there twice"
            found[key] = float(match["value"])
    return found


def test_requests_tokens_caches_and_kv_are_counted(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={"relay_threshold": 1}) as lab:
            empty = parse((await lab.http.get("/metrics")).text)
            assert empty['pddbed_request_success_total{finished_reason="length"}'] == 0
            assert empty["pddbed_time_to_first_token_seconds_count"] == 0
            bounds = [float(b) for b in re.findall(r'pddbed_kv_transfer_seconds_bucket{le="(.*?)"}', " ".join(empty))]
            assert bounds == [*SECONDS, math.inf], "vLLM's buckets, and the smallest before them"
            assert not [name for name in empty if "_created" in name], "when a series began says nothing here"
            first = await lab.complete_after_relay(prompt_of(100), 40, 5)
            again = await lab.complete_after_relay(prompt_of(100), 40, 5)
            leaver = asyncio.create_task(lab.complete(prompt_of(50, seed=1), 3000, ignore_eos=True))
            await eventually(lambda: len(lab.cluster.gateway.dispatcher.live) == 1, 5, "it is under way")
            leaver.cancel()
            await eventually(lambda: not lab.cluster.gateway.dispatcher.live, 5, "all are settled")
            seen = parse((await lab.http.get("/metrics")).text)
            made = [instance for answer in (first, again) for instance in answer["pdd"]["instances"]]
            assert seen['pddbed_request_success_total{finished_reason="length"}'] == 2
            assert seen['pddbed_request_failure_total{error="cancelled"}'] == 1
            assert seen["pddbed_prompt_tokens_total"] == 250
            for name in ("rld0", "md0"):
                assert seen[f'pddbed_generation_tokens_total{{instance="{name}"}}'] >= made.count(name) > 0
            assert seen["pddbed_e2e_request_latency_seconds_count"] == 2
            assert seen["pddbed_inter_token_latency_seconds_count"] >= 2 * 39
            assert seen["pddbed_inter_token_latency_seconds_sum"] > 0
            assert seen['pddbed_prefix_cache_hits_total{cache="prefill"}'] == 99, "the second one's, but for a token"
            assert seen['pddbed_prefix_cache_hits_total{cache="main-decode"}'] == 96, "whole blocks"
            assert seen['pddbed_prefix_cache_queries_total{cache="main-decode"}'] >= 200
            token_bytes = lab.p0.pool.bytes_per_token
            assert seen['pddbed_kv_transfer_bytes_total{way="wan"}'] >= 104 * token_bytes
            assert seen["pddbed_num_requests_running"] == seen["pddbed_num_requests_waiting"] == 0

    run(test())
