"""`handoff`: fluid model and fit by arithmetic, and a short run in which only KV streaming follows the network."""

import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.framework.base import Options, PartResult
from experiments.framework.figures import Figure
from experiments.handoff.endpoint import Pace, host_copies
from experiments.handoff.experiment import Handoff
from experiments.handoff.fit import (
    DELAY_MS,
    LEAST_S,
    LINK_BPS,
    MEAN_MS,
    PEAK_MS,
    STD_MS,
    TOKENS,
    Congestion,
    Fit,
    as_csv,
    drain_s,
    low_bps,
)
from experiments.handoff.runs import parts
from experiments.transport.memory import Shape
from testbed.topology import load_plan
from tests.conftest import ROOT

PACE = Pace(305.2, 4.8, 321.4)  # the published profile
LEVELS = [(0.0, 100.0), (1.0, 10.0), (2.0, 100.0)]


def test_bytes_drain_at_whatever_rate_is_free() -> None:
    assert drain_s(LEVELS, 0.0, 50) == 0.5
    assert drain_s(LEVELS, 0.5, 55) == 1.0  # 50 in half a second, 5 more at a tenth of the rate
    assert drain_s(LEVELS, 1.0, 10) == 1.0
    assert drain_s(LEVELS, 5.0, 1000) == 10.0


@given(st.floats(0, 3), st.floats(1, 500), st.floats(1, 500))
def test_draining_in_two_steps_takes_as_long_as_in_one(start: float, first: float, second: float) -> None:
    whole = drain_s(LEVELS, start, first + second)
    halfway = drain_s(LEVELS, start, first)
    assert abs(halfway + drain_s(LEVELS, start + halfway, second) - whole) < 1e-6


def test_the_fit_hits_the_published_figures_by_the_fluid_model() -> None:
    fit = Fit.read()
    assert fit.low_bps == round(low_bps(fit.bytes_per_token))
    found = [fit.predict_ms(160, seed) for seed in (1, 2, 3)]
    assert abs(statistics.fmean(statistics.fmean(times) for times in found) / MEAN_MS - 1) < 0.10
    assert abs(statistics.fmean(statistics.pstdev(times) for times in found) / STD_MS - 1) < 0.10
    assert all(abs(max(times) - PEAK_MS) < 1 for times in found)


def test_the_topology_is_the_one_that_was_fitted_for() -> None:
    wan = load_plan(ROOT / "topologies" / "handoff.yaml").wans[0]
    assert wan.forward.rate_bps == LINK_BPS
    assert wan.forward.delay_ns == DELAY_MS * 1e6


def test_the_congestion_is_the_same_for_a_seed() -> None:
    congestion = Congestion(100e6, 20e6, 200, 500)
    levels = congestion.levels(60, 1)
    assert levels == congestion.levels(60, 1)
    assert levels != congestion.levels(60, 2)
    gaps = [after - before for (before, _), (after, _) in itertools.pairwise(levels)]
    assert min(gaps) >= LEAST_S - 1e-9
    assert as_csv(levels[:1]) == "time:s,rate:mbit\n0.000000,100.000000\n"


@pytest.mark.parametrize("options", [Options(seeds=3), Options(quick=True, seeds=1)])
def test_a_run_fits_its_time(options: Options) -> None:
    seconds = sum(part.expected_s for part in parts(options, smollm2=True))
    assert seconds < (50 if options.quick else 13 * 60)


def _evaluated(ids_ms: dict[str, list[float]]) -> dict[str, Figure]:
    """A run whose recomputing is the same calm and congested, and whose ids take so long."""
    results = {}
    for part in parts(Options(seeds=1), smollm2=False):
        where = "congested" if part.detail["congested"] else "calm"
        records = []
        for index, ids in enumerate(ids_ms[where]):
            recompute = 305.2 + 4.8 * (-1) ** index
            times = {"pdd_extend_ms": recompute, "pdd_handoff_ms": recompute + ids}
            if part.detail["kind"] == "kv":
                times = {"pdd_kv_xfer_ms": 120 + (100.0 * index if where == "congested" else 0.01 * index)}
            records.append({**times, "pdd_token_ids_ms": ids, "arrival_s": index * 0.6})
        copies = {"median_ms": 0.1, "max_ms": 0.2, "device": "main memory"}
        facts = {"bytes_difference": 0.0, "captured_bytes": {}, "host_copies": copies}
        results[part.name] = (part, PartResult(records, facts))
    return {
        figure.key: figure for figure in Handoff().evaluate(Handoff().parameters(Options(seeds=1)), results).figures
    }


def test_the_verdict_on_recomputing_holds_the_ids_way_against_the_network() -> None:
    steady = _evaluated({"calm": [20.0] * 40, "congested": [20.0] * 40})
    assert (steady["kv_growth"].verdict, steady["recompute_growth"].verdict) == ("met", "met")
    assert steady["recompute_growth"].value == 1.0
    delayed = _evaluated({"calm": [20.0] * 40, "congested": [20.0] * 20 + [120.0] * 20})
    assert delayed["recompute_growth"].verdict == "missed", "ids that congestion delays are a hand-over that it delays"
    assert delayed["recompute_mean"].verdict == "met", "recomputing alone is what was published"


def test_a_short_run_is_not_judged_by_a_late_packet() -> None:
    assert _evaluated({"calm": [20.0] * 6, "congested": [20.0] * 5 + [60.0]})["recompute_growth"].verdict == "reported"


def test_what_follows_from_a_fit_is_no_prediction() -> None:
    figures = _evaluated({"calm": [20.0] * 40, "congested": [20.0] * 40})
    assert {figures[key].label for key in ("kv_mean", "kv_std", "kv_growth")} == {"fitted"}


def test_copies_to_the_host_and_back_are_the_workers_own() -> None:
    found = host_copies(Shape(TOKENS, 4, 1280))
    assert 0 < found["median_ms"] <= found["max_ms"]
    assert found["device"]


@pytest.mark.root
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_short_run_streams_recomputes_and_counts_every_byte(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "testbed", "experiment", "run", "handoff", "--quick", "--out", str(out), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560)
    assert done.returncode in (0, 1), done.stderr
    figures = {figure["key"]: figure for figure in json.loads(done.stdout)["figures"]}
    assert figures["bytes_difference"]["verdict"] == "met", figures["bytes_difference"]
    fit = Fit.read()
    fastest_ms = DELAY_MS + 1000 * fit.wire_bits / LINK_BPS
    by_part: dict[str, list[dict[str, float]]] = {}
    for line in (out / "requests.jsonl").read_text().splitlines():
        record = json.loads(line)
        by_part.setdefault(record["row"], []).append(record)
    streamed = {row: [r["pdd_kv_xfer_ms"] for r in by_part[row]] for row in ("kv, calm", "kv, congested")}
    assert min(min(times) for times in streamed.values()) > 0.98 * fastest_ms, "faster than the link"
    assert max(streamed["kv, congested"]) > 1.5 * fastest_ms, "no burst was felt"
    for row in ("recompute, calm", "recompute, congested"):
        for index, record in enumerate(by_part[row]):
            assert record["pdd_computed_ms"] > 0
            assert record["pdd_token_ids_ms"] >= DELAY_MS
            assert record["pdd_extend_ms"] >= PACE.draw_ms(index), "faster than the profile"
