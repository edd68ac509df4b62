"""A worker with a profile takes its times, and keeps a file that says how well it does."""

import asyncio
import json
from pathlib import Path

import httpx

from tests.workers.serving import eventually, prompt_of, run
from workers.engine import PaceCounts, Profile
from workers.linefile import Unwritten
from workers.local import InProcessCluster, Layout
from workers.models import LoadedModel
from workers.worker_records import PaceLog

SLOW = {"name": "slow", "prefill_token_ns": 1e5, "decode_step_ns": 20_000_000, "extend_token_ns": 1e5}


def test_workers_are_paced_each_by_its_profile_and_say_how_that_goes(tiny: LoadedModel, tmp_path: Path) -> None:
    async def scenario() -> None:
        extra = {name: {"PDDBED_PROFILE": json.dumps({**SLOW, "name": f"chip-of-{name}"})} for name in ("p0", "rld0")}
        async with InProcessCluster(tiny, Layout(extra=extra), tmp_path) as cluster:
            async with httpx.AsyncClient(base_url=cluster.base_url, timeout=30) as http:
                body = {"prompt": prompt_of(50), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                answer = (await http.post("/v1/completions", json=body)).json()
            assert answer["usage"]["completion_tokens"] == 8
            prefill = cluster.worker("p0").runner.pace
            assert prefill is not None
            assert (prefill.steps, prefill.paced_ns) == (1, 5_000_000)
            assert cluster.worker("md0").runner.pace is None
            found = tmp_path / "pace-p0.json"
            await eventually(lambda: found.exists() and json.loads(found.read_text())["steps"] == 1, 20, "it is told")
        row = json.loads(found.read_text())
        assert (row["host"], row["profile"], row["paced_ns"]) == ("p0", "chip-of-p0", 5_000_000)
        assert (tmp_path / "pace-rld0.json").exists()
        assert not (tmp_path / "pace-md0.json").exists(), "it has no profile"

    run(scenario())


def test_the_file_follows_the_counts(tmp_path: Path) -> None:
    counts = PaceCounts(steps=3, paced_ns=10)
    log = PaceLog(tmp_path / "made", "p0", Profile("chip", 1, 1, 1), lambda: counts, Unwritten())

    async def scenario() -> None:
        nonlocal counts
        keeping = asyncio.create_task(log.keep())
        file = tmp_path / "made" / "pace-p0.json"
        await eventually(file.exists, 20, "the first word")
        counts = PaceCounts(steps=104, late=2, overran=1, paced_ns=10**9)
        await eventually(lambda: json.loads(file.read_text())["steps"] == 104, 20, "the second")
        row = json.loads(file.read_text())
        assert (row["host"], row["profile"], row["late"], row["overran"]) == ("p0", "chip", 2, 1)
        keeping.cancel()

    run(scenario())
