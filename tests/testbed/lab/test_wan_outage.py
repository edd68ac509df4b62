"""The WAN goes away under a request: before the hand-over the relay finishes; a short outage later only delays."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from testbed.topology.overlay import laid_over
from tests.conftest import ROOT, Lab, run_pddbed
from workers.engine import Sampling, generate
from workers.models import LoadedModel, ModelSpec, load_model

pytestmark = pytest.mark.root
LENGTH = 1000  # two frames of KV: the first tells the timeline


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(ModelSpec("tiny"))


def prompt_of(first: int) -> list[int]:
    return [first, *((17 + 31 * number + number * number) % 256 for number in range(LENGTH - 1))]


def complete(lab: Lab, prompt: list[int], tokens: int) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{lab.status()['api']}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def record_of(request: str, lab: str) -> dict[str, Any]:
    """The line that a request leaves when every worker has let go of it."""
    file, end = Path(f"/run/pddbed/{lab}/records/requests.jsonl"), time.monotonic() + 60
    while time.monotonic() < end:
        for line in file.read_text().splitlines() if file.exists() else []:
            record: dict[str, Any] = json.loads(line)
            if record["request_id"] == request:
                return record
        time.sleep(0.1)
    raise AssertionError(f"request {request} was not settled within 60 s")


def test_an_outage_is_hidden_by_the_relay_before_the_hand_over_and_a_delay_after_it(
    raise_lab: Callable[..., Lab], tiny: LoadedModel, tmp_path: Path
) -> None:
    file = tmp_path / "slow.yaml"
    file.write_text(laid_over(ROOT / "topologies" / "two-dc-tiny.yaml", {"wan.wan0.rate": "2mbit"}))
    lab = raise_lab(file, "wan-outage", "--no-verify")

    def asked_with_outage(fraction: str, duration: str, first: int, tokens: int) -> tuple[list[str], dict[str, Any]]:
        timeline = tmp_path / f"{first}.yaml"
        event = f"{{event: kv-transfer, fraction: {fraction}}}"
        timeline.write_text(f"- outage: {{when: {event}, link: wan0, duration: {duration}}}\n")
        played = run_pddbed("wan", "play", str(timeline), "--lab", "wan-outage")
        assert played.returncode == 0, played.stderr
        prompt = prompt_of(first)
        answer = complete(lab, prompt, tokens)
        assert answer["pdd"]["token_ids"] == generate(tiny, prompt, Sampling(max_tokens=tokens, ignore_eos=True))
        instances: list[str] = answer["pdd"]["instances"]
        return instances, record_of(answer["id"], "wan-outage")

    # Slow enough that the outage is there before the KV's second half, however late a busy machine makes it.
    instances, record = asked_with_outage("30%", "8s", first=1, tokens=150)
    assert set(instances) == {"rld0"}
    assert record["pdd_recovery"] == []
    assert record["pdd_unsettled"] == []
    assert record["pdd_kv_xfer_ms"] > 8000, "main decode's cache is completed when the WAN is back"

    changed = run_pddbed("wan", "set", "wan0", "--rate", "40mbit", "--lab", "wan-outage")
    assert changed.returncode == 0, changed.stderr
    instances, record = asked_with_outage("100%", "500ms", first=2, tokens=1500)
    assert instances[-1] == "md0"
    assert record["pdd_recovery"] == []
    assert record["pdd_replays"] == 0
