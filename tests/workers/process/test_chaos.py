"""The chaos of `benchmarks/chaos.py` in its short form: rude clients and faults of workers beside right requests."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import controls, full_disk, over_a_cluster
from benchmarks.chaos_checks import books, verdict
from testbed.lab.troubles import Troubles
from tests.workers.failures.rig import Answer, Rig
from tests.workers.serving import prompt_of
from workers.models import LoadedModel

RIGHT: dict[str, Any] = {
    "requests": 9,
    "equal": 9,
    "errors": [],
    "wrong": [],
    "faults": {"full disk": 1},
    "records": {"settled": 20, "lines": 17, "unwritten": 3, "told": 3},
    "records_twice": 0,
    "records_missing": 2,
    "same_gateway": True,
    "health_s": {"failed": [], "max": 0.1, "late": 0.0},
    "gateway": {"before": {"rss_kb": 1, "descriptors": 9}, "after": {"rss_kb": 1, "descriptors": 9}},
}


@pytest.mark.quiet
def test_right_requests_are_answered_among_rude_clients_and_failing_workers(tmp_path: Path) -> None:
    row = over_a_cluster(requests=50, faults=50, clients=6, seed=2, mode="overlap", directory=tmp_path)
    print(row)
    assert verdict(row) == []
    assert sum(row["faults"].values()) >= 50


def test_an_answer_is_asked_for_only_as_far_as_the_control_is_sure(tiny: LoadedModel) -> None:
    """With seed 4, the control's two best tokens at 28 are 1.2e-6 apart; a batch of twelve turns them round."""
    cases = controls(tiny, 36, random.Random(4))
    assert cases[35].prompt == tuple(prompt_of(15, seed=7035))
    assert (cases[35].max_tokens, len(cases[35].expected)) == (28, 28)
    assert [number for number, case in enumerate(cases) if case.shortened] == [35]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"equal": 8}, "1 answers are not the control's"),
        ({"records_missing": 5}, "5 requests were not recorded, 3 counted as unwritten"),
        (
            {"records": {"settled": 21, "lines": 17, "unwritten": 3, "told": 3}},
            "21 requests were settled, 17 recorded and 3 counted as unwritten",
        ),
        (
            {"records": {"settled": 20, "lines": 17, "unwritten": 3, "told": 2}},
            "/metrics counts 3 unwritten records, the lab is told of 2",
        ),
        ({"faults": {}}, "3 records were not written, though the disk was never full"),
    ],
)
def test_the_verdict(change: dict[str, Any], words: str | None) -> None:
    assert verdict({**RIGHT, **change}) == ([] if words is None else [words])


def test_records_that_a_full_disk_takes_are_those_that_the_gateway_counts(tmp_path: Path) -> None:
    troubles = Troubles(tmp_path / "unwritten.now", ["gw0"])
    extra = {"gw0": {"PDDBED_UNWRITTEN": f"0:{tmp_path / 'unwritten.now'}"}}
    seen: list[dict[str, Any]] = []

    async def ask(rig: Rig, times: int) -> None:
        for _ in range(times):
            answer = await rig.stream(Answer(), prompt_of(9), 3)
            seen.append({"id": answer.request_id})
        await rig.settled()

    async def everything(rig: Rig) -> list[str]:
        await ask(rig, 2)
        async with full_disk(rig.cluster.pids["gw0"]):
            await asyncio.gather(ask(rig, 2), ask(rig, 1))
        await ask(rig, 1)
        return await rig.metrics()

    with Rig(tmp_path, {}, extra=extra) as rig:
        metrics = rig.run(everything(rig))
        lines = (rig.cluster.records / "requests.jsonl").read_text().splitlines()
    told = troubles.unwritten()["gw0"]["requests"]
    found = books(seen, lines, metrics, told)
    assert found["records"] == {"settled": 6, "lines": 3, "unwritten": 3, "told": 3}
    assert (found["records_missing"], found["records_twice"]) == (3, 0)
    assert verdict({**RIGHT, **found}) == []
    lost = books(seen, lines[:-1], metrics, told)
    assert verdict({**RIGHT, **lost}) == [
        "6 requests were settled, 2 recorded and 3 counted as unwritten",
        "4 requests were not recorded, 3 counted as unwritten",
    ]
