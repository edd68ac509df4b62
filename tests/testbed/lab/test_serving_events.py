"""A timeline may wait for the serving: the WAN goes away in the middle of a KV transfer, and the answer stays right."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from testbed.topology.overlay import laid_over
from tests.conftest import ROOT, Lab
from tests.testbed.lab.test_wan_outage import record_of
from workers.engine import Sampling, generate
from workers.models import ModelSpec, load_model

pytestmark = pytest.mark.root
LENGTH, TOKENS = 1000, 1000
OUTAGE = """
congestion:
  - outage: {when: {event: kv-transfer, fraction: 30%}, link: wan0, direction: forward, duration: 700ms}
"""


def test_an_outage_in_the_middle_of_a_kv_transfer_is_triggered_by_the_receiver(
    raise_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    file = tmp_path / "cut.yaml"
    file.write_text(laid_over(ROOT / "topologies" / "two-dc-tiny.yaml", {"wan.wan0.rate": "20mbit"}) + OUTAGE)
    lab = raise_lab(file, "cut-transfer", "--no-verify")
    prompt = [(17 + 31 * number + number * number) % 256 for number in range(LENGTH)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{lab.status()['api']}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    answered = response.json()
    answer = answered["pdd"]
    loaded = load_model(ModelSpec("tiny"))
    assert answer["token_ids"] == generate(loaded, prompt, Sampling(max_tokens=TOKENS, ignore_eos=True))
    rows = [
        json.loads(line) for line in Path("/run/pddbed/cut-transfer/records/congestion.jsonl").read_text().splitlines()
    ]
    assert any("outage" in json.dumps(row) and "kv-transfer" in json.dumps(row) for row in rows), rows
    # a fast relay has answered before the KV is there
    transfer_ms = record_of(answered["id"], "cut-transfer")["pdd_kv_xfer_ms"]
    asked_ms = LENGTH * 2048 * 8 / 20e6 * 1000
    assert transfer_ms > asked_ms + 600, "the cut fell into the transfer"
