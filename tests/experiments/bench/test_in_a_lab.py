"""`pddbed bench` on a lab's own gateway: its records, its links, and a report of both."""

import json
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
