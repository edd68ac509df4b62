"""`pddbed bench` on a lab's own gateway: its records, its links, and a report of both."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Lab, run_pddbed

TOPOLOGY = ROOT / "topologies" / "two-dc-tiny.yaml"


@pytest.mark.root
def test_a_lab_tells_what_the_stream_cannot_and_its_links_are_in_the_run(
    raise_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    raise_lab(TOPOLOGY, "bench-records")
    out = tmp_path / "run"
    # two tokens: the answer ends on the relay, long before the KV has crossed the WAN
    load = ("--num", "6", "--rate", "20", "--input-len", "64", "--output-len", "2")
    result = run_pddbed("bench", "-l", "bench-records", *load, "--out", str(out), "--json")
    summary: dict[str, Any] = json.loads(result.stdout)
    assert summary["completed"] == 6, result.stderr
    assert result.returncode == (0 if summary["faithful"] else 1), "a busy machine may say that it was late"
    assert not any("no record" in reason for reason in summary["reasons"])
    rows = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert all(row["pdd_delta_bytes"] > 0 for row in rows), "known when the KV has arrived, after the answer"
    assert summary["pdd_total_delta_bytes"] == sum(row["pdd_delta_bytes"] for row in rows)
    assert summary["p99_pdd_kv_xfer_ms"] >= summary["median_pdd_kv_xfer_ms"] > 20, "one way takes 20 ms"
    about = json.loads((out / "run.json").read_text())
    (lab,) = about["labs"]
    for when in ("verified_before", "verified_after"):
        assert [link["name"] for link in lab[when]["links"]] == ["wan0"]
    assert about["topology"] == TOPOLOGY.read_text()
    assert len(about["parameters"]["trace_sha256"]) == 64
    again = run_pddbed("report", str(out), "--json")
    assert again.returncode == result.returncode
    assert json.loads(again.stdout)["faithful"] == summary["faithful"]
    without = run_pddbed("bench", "-l", "bench-none")
    assert (without.returncode, without.stdout) == (1, "")
    assert 'no lab "bench-none" is up; these are: ' in without.stderr


@pytest.mark.root
@pytest.mark.nightly
def test_runs_know_what_the_links_were_asked_to_do_and_what_was_changed_meanwhile(
    raise_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    raise_lab(TOPOLOGY, "bench-settings", "--no-verify")
    load = ("-l", "bench-settings", "--no-verify", "--input-len", "32", "--output-len", "2", "--warm-up", "1")
    for name in ("near", "far"):
        result = run_pddbed("bench", *load, "--num", "2", "--out", str(tmp_path / name), "--seed", name_seed(name))
        assert "Successful requests:                     2" in result.stdout, result.stderr
        assert run_pddbed("wan", "set", "-l", "bench-settings", "wan0", "--delay", "200ms").returncode == 0
    found = json.loads(run_pddbed("compare", str(tmp_path / "near"), str(tmp_path / "far"), "--json").stdout)
    assert found["differences"].keys() == {"seed", "trace", "link wan0 forward", "link wan0 backward"}
    for direction in ("forward", "backward"):
        near, far = found["differences"][f"link wan0 {direction}"]
        assert ("20ms" in near, "200ms" in far) == (True, True)
    assert "asked when measuring began" in (tmp_path / "far" / "report.html").read_text()

    slow = ("--num", "40", "--rate", "10", "--seed", "3", "--json", "--out", str(tmp_path / "changed"))
    command = [sys.executable, "-c", "from testbed.cli import main; main(prog_name='pddbed')", "bench", *load, *slow]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as running:
        deadline = time.monotonic() + 60
        while not (tmp_path / "changed" / "links.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.0)
        for delay in ("50ms", "60ms"):
            changed = run_pddbed(
                "wan", "set", "-l", "bench-settings", "wan0", "--direction", "forward", "--delay", delay
            )
            assert changed.returncode == 0, changed.stderr
        assert running.stdout is not None
        summary = json.loads(running.stdout.read())
    assert running.returncode == 1
    (said,) = [reason for reason in summary["reasons"] if "changed by hand" in reason]
    assert said.startswith("bench: links were changed by hand while it ran: wan0 forward to ")
    assert (", 50ms" in said, ", 60ms" in said) == (True, True)
    assert summary["pdd_link_changes"] == {"hand": 2}
    about = json.loads((tmp_path / "changed" / "run.json").read_text())
    assert "200ms" in about["labs"][0]["settings"]["wan0 forward"], "as it was when measuring began"


def name_seed(name: str) -> str:
    return {"near": "1", "far": "2"}[name]
