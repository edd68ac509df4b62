"""A whole lab on the netem driver: it comes up, a request is relayed across the WAN, and nothing is left of it.

Deadlines are generous, since the VM's CPU is emulated; the rate is one that it can carry.
"""

import json
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.topology.overlay import laid_over

ROOT = Path(__file__).parents[2]
TOKENS = 60
PROMPT = [(17 + 31 * number) % 256 for number in range(40)]
CONTROL = f"""
import json, torch
torch.set_num_threads(1)
from workers.engine import Sampling, generate
from workers.models import ModelSpec, load_model
sampling = Sampling(max_tokens={TOKENS}, ignore_eos=True)
print(json.dumps(generate(load_model(ModelSpec("tiny")), {PROMPT}, sampling)))
"""


def pddbed(*arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from testbed.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    file = tmp_path_factory.mktemp("lab") / "netem.yaml"
    overlay = {"wan.wan0.rate": "10mbit", "datacenters.main.fabric": {"rate": "20mbit", "delay": "3ms"}}
    file.write_text(laid_over(ROOT / "topologies" / "two-dc-tiny.yaml", overlay))
    result = pddbed("up", str(file), "--name", "netem", "--api", "auto", "--no-verify")
    assert result.returncode == 0, result.stderr
    status = pddbed("status", "--json")
    assert status.returncode == 0, status.stderr
    yield json.loads(status.stdout)
    result = pddbed("down", "netem")
    assert result.returncode == 0, result.stderr
    assert not Path("/run/pddbed/netem").exists()


def test_auto_chooses_netem_here(lab: dict[str, Any]) -> None:
    assert lab["driver"] == "netem"
    assert [link["driver"] for link in lab["links"]] == ["netem"]


def test_a_ping_between_the_datacenters_takes_the_files_delay(lab: dict[str, Any]) -> None:
    result = pddbed("exec", "gw0", "--", "ping", "-n", "-c", "20", "-i", "0.2", "md0")
    assert result.returncode == 0, result.stdout + result.stderr
    times = [float(word[5:]) for word in result.stdout.split() if word.startswith("time=")]
    # Three hops of an emulated CPU each way, and timers that fire late there; never early. 6 ms are the fabric's.
    assert 46 <= statistics.median(times) <= 52, times


def test_a_fabric_has_the_files_delay_and_rate(lab: dict[str, Any]) -> None:
    result = pddbed("exec", "p0", "--", "ping", "-n", "-c", "20", "-i", "0.2", "rld0")
    times = [float(word[5:]) for word in result.stdout.split() if word.startswith("time=")]
    assert 6 <= statistics.median(times) <= 9, result.stdout + result.stderr
    pddbed("exec", "rld0", "--", "sh", "-c", "iperf3 -s -1 -D --logfile /dev/null")
    report = json.loads(pddbed("exec", "p0", "--", "iperf3", "-c", "rld0", "-t", "4", "-O", "1", "-J").stdout)
    assert 15e6 < report["end"]["sum_received"]["bits_per_second"] < 20.5e6, report["end"]


def test_a_request_is_relayed_and_answered_as_by_one_process_alone(lab: dict[str, Any]) -> None:
    control = subprocess.run([sys.executable, "-c", CONTROL], cwd=ROOT, capture_output=True, text=True, check=True)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(f"{lab['api']}/v1/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=240) as response:
        answer = json.load(response)["pdd"]
    assert answer["token_ids"] == json.loads(control.stdout)
    assert set(answer["instances"]) == {"rld0", "md0"}
    counters = json.loads(pddbed("wan", "show", "--json").stdout)[0]["counters"]["forward"]
    assert counters["bytes"] > len(PROMPT) * 2048, "the prompt's KV crossed the netem link"
    assert counters["dropped_unasked"] == 0
