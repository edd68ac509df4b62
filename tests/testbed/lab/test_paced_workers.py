"""Workers of a lab take their profiles' times, in the scale of the file, and a lab that cannot keep them says so."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.conftest import Lab, run_pddbed

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("leaves_nothing")]

# md0's profile is faster than any machine: each of its steps is late, the more the longer it works
TOPOLOGY = """
name: paced
datacenters:
  main:
    subnet: 10.1.0.0/24
    hosts: {gw0: {role: gateway}, p0: {role: prefill, profile: gpu}}
  remote:
    subnet: 10.2.0.0/24
    hosts: {md0: {role: main-decode, profile: dream}}
wan:
  - {between: [main, remote], rate: 1gbit, rtt: 40ms}
profiles:
  gpu: {prefill: 9000 tokens/s, decode: 30ms}
  dream: {relative_to: gpu, decode: 100000%}
scale:
  kv_bytes_per_token: {deployment: 4KiB, lab: LAB_KV}
  prompt_divisor: 16
serving: {pipeline: cdc-pd, kv_pool: {connections: 2, rate: 500mbit}}
"""
PROMPT_TOKENS, PREFILL_S = 400, 400 * 16 / 9000


def paces(lab: Lab, steps: int) -> dict[str, dict[str, int]]:
    """What each worker says, once p0 has told of so many steps."""
    deadline = time.monotonic() + 30
    while True:
        found = {host["name"]: host["pace"] for host in lab.status()["hosts"]}
        if found["p0"] is not None and found["p0"]["steps"] >= steps and found["md0"]["steps"] >= 20:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def test_a_lab_is_paced_scaled_and_honest_about_it(raise_lab: Callable[..., Lab], tmp_path: Path) -> None:
    file = tmp_path / "paced.yaml"
    file.write_text(TOPOLOGY.replace("LAB_KV", "2KiB"))
    lab = raise_lab(file, "paced", "--no-verify")
    body = {"model": "tiny", "prompt": list(range(32, 72)) * 10, "max_tokens": 21, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(f"{lab.status()['api']}/v1/completions", json=body, timeout=60).json()
    record = answer["pdd"]["record"]
    assert record["ttft"] > PREFILL_S, "faster than its profile"
    assert record["pdd_delta_bytes"] == PROMPT_TOKENS * 2048
    found = paces(lab, steps=3)
    assert found["gw0"] is None
    assert found["p0"]["paced_ns"] == pytest.approx(PREFILL_S * 1e9, rel=1e-6)
    assert found["p0"]["profile"] == "gpu"
    assert found["md0"]["overran"] > 1, "this machine is no dream"
    assert "prefill (paced as gpu," in run_pddbed("status", "-l", "paced").stdout.replace("\n", " ")
    verified = json.loads(run_pddbed("verify", "-l", "paced", "--quick", "--json").stdout)
    assert not verified["faithful"]
    assert any("in more than the time of dream" in reason for reason in verified["reasons"]), verified["reasons"]
    pids = lab.exec("gw0", "pgrep", "-f", "workers.forkserver").stdout.split()
    classes = lab.exec("gw0", "ps", "-o", "cls=", "-p", ",".join(pids)).stdout.split()
    assert classes.count("FF") == 2, "the event loops of p0 and md0, not of the gateway, are in real time"


def test_a_scale_made_for_another_models_kv_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(TOPOLOGY.replace("LAB_KV", "1KiB"))
    result = run_pddbed("up", str(file), "--name", "wrong-kv", "--api", "auto", "--no-verify")
    assert result.returncode == 1
    sentence = (
        "the scale is made for 1024 bytes of KV a token, and model tiny has 2048; write that as scale.kv_bytes_per"
    )
    assert sentence in " ".join(result.stderr.split())
