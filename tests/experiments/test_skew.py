"""`skew`: the fit hits its targets, both rows get the same arrivals, and a short run reproduces the medians."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.framework.base import Options
from experiments.skew.fit import CONNECTIONS, Fit, refit, solve_base_and_whole, waits
from experiments.skew.runs import BLOCKS, first_blocks, parts
from experiments.traces.hit_rates import SKEWED, UNIFORM
from testbed.lab.record import live_records
from testbed.topology import load_plan
from tests.conftest import ROOT

FULL, QUICK = Options(seeds=3), Options(quick=True, seeds=1)
PATIENCE_S = 400


def test_the_fit_hits_the_published_figures_by_arithmetic() -> None:
    fit = Fit.read()
    assert abs(fit.hold_ms(SKEWED.median) - 248) < 1
    assert abs(fit.hold_ms(UNIFORM.median) - 1210) < 1
    assert 1.04 <= fit.load <= 1.05
    for seed in (1, 2, 3):
        waited = fit.predict_waits_ms(UNIFORM, 512, seed)
        assert abs(sum(waited) / len(waited) / 1682 - 1) < 0.15
        assert max(fit.predict_waits_ms(SKEWED, 512, seed)) == 0


def test_the_topology_has_the_fitted_round_trip() -> None:
    plan = load_plan(ROOT / "topologies" / "skew.yaml")
    assert plan.wans[0].rtt_ns == round(Fit.read().rtt_ms * 1e6)
    assert plan.serving["kv_pool"]["connections"] == CONNECTIONS
    rate_bps = plan.wans[0].forward.rate_bps
    assert rate_bps is not None
    assert rate_bps > 1.1 * CONNECTIONS * Fit.read().connection_bps(1 << 20), "no room for all connections at once"


def test_a_refit_finds_the_parameters_that_were_off() -> None:
    before = Fit(rtt_ms=100, whole_configured_ms=1000, base_ms=0, whole_ms=0, spacing_ms=1, how="")
    measured = [(miss, 107 + miss * 1010) for miss in (0.01, 0.2, 0.5, 1.0)]
    found = refit(before, measured, "test")
    base_ms, whole_ms = solve_base_and_whole()
    assert abs(found.rtt_ms + 7 - base_ms) < 0.1
    assert abs(found.whole_configured_ms * 1.01 - whole_ms) < 0.2
    assert 1.04 <= found.load <= 1.05


@pytest.mark.parametrize("options", [FULL, QUICK])
def test_both_rows_get_the_same_arrivals_and_hit_as_published(options: Options) -> None:
    made = {part.name: part for part in parts(options, Fit.read())}
    for seed in range(1, options.seeds + 1):
        skewed, uniform = made[f"skewed-seed{seed}"], made[f"uniform-seed{seed}"]
        for key in ("transfers", "spacing_ms"):
            assert skewed.detail[key] == uniform.detail[key]
        hits = [first / BLOCKS for first in first_blocks(skewed)]
        assert 0.70 <= sum(hit > 0.95 for hit in hits) / len(hits) <= 0.80
        assert all(0 <= first < BLOCKS for first in [*first_blocks(skewed), *first_blocks(uniform)])
    assert (len(made) > 2) == (not options.quick)


def test_a_full_run_fits_into_a_quarter_of_an_hour() -> None:
    assert sum(part.expected_s for part in parts(FULL, Fit.read())) < 13 * 60
    assert sum(part.expected_s for part in parts(QUICK, Fit.read())) < 45


def _command(out: Path) -> list[str]:
    return [sys.executable, "-m", "testbed", "experiment", "run", "skew", "--quick", "--out", str(out), "--json"]


def _interrupt_after_one_part(out: Path) -> None:
    child = subprocess.Popen(_command(out), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE_S
    while not (out / "parts" / "skewed-seed1" / "part.json").exists():
        assert child.poll() is None, child.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 130
    assert not [record.name for record in live_records() if record.name == f"skew-{child.pid}"]
    assert f"go on with: pddbed experiment run skew --quick --out {out}" in said


@pytest.mark.root
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_short_run_that_was_interrupted_goes_on_and_has_the_published_medians(tmp_path: Path) -> None:
    out = tmp_path / "run"
    _interrupt_after_one_part(out)
    first = (out / "parts" / "skewed-seed1" / "requests.jsonl").read_bytes()

    again = subprocess.run(_command(out), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert again.returncode in (0, 1), again.stderr  # 1 where the machine was too busy to be faithful
    assert (out / "parts" / "skewed-seed1" / "requests.jsonl").read_bytes() == first, "done is done"
    summary = json.loads(again.stdout)
    figures = {figure["key"]: figure for figure in summary["figures"]}
    assert summary["complete"]
    assert figures["p50_transfer_skewed"]["verdict"] == "met", figures["p50_transfer_skewed"]
    assert figures["p50_transfer_uniform"]["verdict"] == "met", figures["p50_transfer_uniform"]
    assert figures["share_above_95"]["verdict"] == "met"
    assert figures["bytes_difference"]["measured"] == 0, "nothing was on its way when counters were read"
    assert summary["faithful"] == (not summary["reasons"])

    run = json.loads((out / "run.json").read_text())
    assert [lab["parts"] for lab in run["labs"]] == [["skewed-seed1"], ["uniform-seed1"]]
    assert run["parameters"]["fit"]["how"]
    records = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert len(records) == 160
    _every_byte_crossed(out, records)
    _queue_is_first_come(out)

    timeline = json.loads((out / "timeline.json").read_text())
    assert sum(event["name"] == "wan-transfer" for event in timeline["traceEvents"]) == 160
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 3
    assert not re.search(r'(?:src|href)="', page), "the page needs nothing else"

    # a run of other parameters does not go on in this directory
    other = [argument for argument in _command(out) if argument != "--quick"]
    refused = subprocess.run(other, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert "holds a run of skew with other parameters" in refused.stderr


def _every_byte_crossed(out: Path, records: list[dict[str, object]]) -> None:
    """The capture saw at least all KV that the records claim, and little more: frames, tokens, confirmations."""
    captured = 0
    for part in ("skewed-seed1", "uniform-seed1"):
        captured += sum(
            json.loads((out / "parts" / part / "part.json").read_text())["facts"]["captured_bytes"].values()
        )
    sent = sum(int(str(record["pdd_delta_bytes"])) for record in records)
    assert sent <= captured <= 1.05 * sent + 160 * 2500


def _queue_is_first_come(out: Path) -> None:
    """What each transfer waited is what a first-come queue makes of the measured times."""
    lines = (out / "parts" / "uniform-seed1" / "requests.jsonl").read_text().splitlines()
    records = sorted((json.loads(line) for line in lines), key=lambda record: float(record["arrival_s"]))
    arrivals = [record["arrival_s"] * 1000 for record in records]
    waited = waits(arrivals, [record["pdd_kv_held_ms"] for record in records], CONNECTIONS)
    for record, expected in zip(records, waited, strict=True):
        assert record["pdd_kv_queue_ms"] >= expected - 5
    measured = sum(record["pdd_kv_queue_ms"] for record in records) / len(records)
    assert measured <= sum(waited) / len(waited) + 50
