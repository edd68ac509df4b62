"""`ttft`, `split`, `consistency`: the same requests for every policy, and figures that follow from the records."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments.framework.base import Options, Part, PartResult
from experiments.framework.figures import Figure
from experiments.framework.registry import find
from experiments.sim.deployment import VARIANTS
from experiments.sim.outcome import Outcome
from experiments.ttft.experiment import Consistency, Split, Ttft
from experiments.ttft.fit import TOPOLOGY, Fit, predicted
from experiments.ttft.load import BESIDE, FULL, JUDGED, QUICK, Shape, workload
from experiments.ttft.runs import variation
from testbed.topology import load_plan
from testbed.topology.overlay import laid_over

FIT = Fit.read()
SMALL = Shape(160, 16, 256, 8, 16)


def record(one: Outcome, faster: float) -> dict[str, Any]:
    """As the session would write it, had the lab done exactly what the simulator says."""
    return {
        "request_id": f"r{one.index}",
        "index": one.index,
        "arrival_s": one.arrival_s,
        "success": True,
        "output_len": one.answer_tokens,
        "ttft_ms": one.ttft_s * 1000,
        "tpot_ms": None if one.tpot_s is None else one.tpot_s * 1000 / 8,
        "e2el_ms": one.e2el_s * 1000,
        "kv_xfer_ms": None if one.kv_xfer_s is None else one.kv_xfer_s * 1000,
        "kv_queue_ms": None if one.kv_queue_s is None else one.kv_queue_s * 1000,
        "pdd_kv_xfer_ms": None if one.kv_xfer_s is None else one.kv_xfer_s * 1000 / faster,
        "pdd_kv_queue_ms": None if one.kv_queue_s is None else one.kv_queue_s * 1000 / faster,
        "pdd_pipeline": one.pipeline,
        "pdd_p_hit": one.p_hit,
        "pdd_hit_rate": one.md_hit or 0.0,
        "pdd_rld_tokens": one.relayed,
    }


def simulated_results(
    experiment: Ttft, options: Options, slower: float = 1.0
) -> tuple[dict[str, Any], dict[str, tuple[Part, PartResult]]]:
    """A run whose lab did what the simulator says, `slower` times as slow to the first token."""
    parameters = json.loads(json.dumps(experiment.parameters(options)))
    shape, results = Shape(**parameters["shape"]), {}
    for part in experiment.parts(options):
        recipe = FIT.recipe(part.seed, part.detail["requests"], shape.sessions)
        run = predicted(FIT, part.detail["row"], recipe, shape.output_divisor)
        records = [record(one, shape.time_compression) for one in run.outcomes]
        for row in records:
            row["ttft_ms"] *= slower
        facts = {
            "bytes_difference": 0.001,
            "captured_bytes": {},
            "captured_packets": 1000,
            "pace": {"p0": {"steps": 100, "late": 0}},
            "cpu_share": {"busy": 0.5, "stolen": 0.0},
        }
        results[part.name] = (part, PartResult(records, facts))
    return parameters, results


def by_key(figures: Mapping[str, Any] | Any) -> dict[str, Figure]:
    return {figure.key: figure for figure in figures}


def test_every_policy_gets_the_same_requests_in_the_same_moments() -> None:
    made = workload(FIT, SMALL, 1, 50)
    again = workload(FIT, SMALL, 1, 50)
    assert made == again
    assert len(made.warm_up) == SMALL.sessions
    assert len(made.measured) == 50
    assert made.measured[-1].due_ns == pytest.approx(made.trace.requests[-1].time_ns / SMALL.time_compression)
    for one in made.measured:
        assert len(one.prompt) == one.request.input_tokens // SMALL.prompt_divisor
        assert len(one.prompt) + one.answer_tokens < 4096, "fits the model's context"


def test_equal_blocks_are_equal_tokens() -> None:
    made = workload(FIT, SMALL, 1, 50)
    last: dict[int | None, Any] = {}
    for one in [*made.warm_up, *made.measured]:
        before = last.get(one.request.session)
        if before is not None:
            shared = sum(a == b for a, b in zip(before.request.blocks, one.request.blocks, strict=False))
            tokens = shared * made.trace.block_tokens // SMALL.prompt_divisor
            assert before.prompt[:tokens] == one.prompt[:tokens]
        last[one.request.session] = one


@pytest.mark.parametrize("name", [*JUDGED, *BESIDE])
@pytest.mark.parametrize("shape", [FULL, QUICK])
def test_each_variant_has_a_lab_of_its_own(name: str, shape: Shape, tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(laid_over(TOPOLOGY, variation(name, FIT, shape)))
    plan, variant = load_plan(file), VARIANTS[name]
    assert plan.serving["pipeline"] == variant.policy
    assert plan.serving["end_on_rld"] == variant.end_on_rld
    assert plan.serving["kv_send"] == ("chunked" if variant.chunked else "after-prefill")
    assert plan.serving["block_size"] == 1024 // shape.prompt_divisor
    assert plan.serving["busy_tokens"] == max(1, round(FIT.busy_tokens / shape.prompt_divisor))
    assert plan.wans[0].rtt_ns == pytest.approx(FIT.rtt_s * 1e9 / shape.time_compression, rel=1e-6)


def test_a_full_run_has_3000_requests_a_policy_and_fits_75_minutes() -> None:
    parts = Ttft().parts(Options(seeds=3))
    for name in JUDGED:
        assert sum(part.detail["requests"] for part in parts if part.detail["row"] == name) >= 3000
    assert sum(part.expected_s for part in parts) < 75 * 60
    assert [part.variant for part in parts] == sorted((part.variant for part in parts), key=[*JUDGED, *BESIDE].index)


def test_figures_follow_from_the_records() -> None:
    experiment, options = Ttft(Shape(1200, 64, 256, 8, 16)), Options(seeds=3)
    parameters, results = simulated_results(experiment, options)
    found = by_key(experiment.evaluate(parameters, results).figures)
    for key in ("p90_ttft_pdd", "p99_ttft_pdd", "p90_ttft_cdc_pd", "p99_ttft_cdc_pd", "sla_cdc_pd"):
        assert found[key].verdict == "met", key
    assert found["p99_ttft_cdc_pd"].label == "predicted"
    assert found["sim_p90_ttft_pdd"].value == pytest.approx(found["sim_p90_ttft_pdd"].target)
    assert found["rld_share"].verdict == "met"
    assert found["behind_handover"].verdict == "met"
    assert found["behind_end_on_rld"].verdict == "met"
    assert len(found["p90_ttft_pdd"].values) == 3


def test_the_sla_is_met_where_the_percentiles_are_within_it() -> None:
    experiment, options = Ttft(SMALL), Options(seeds=1)
    fast, slow = (
        by_key(experiment.evaluate(*simulated_results(experiment, options, slower)).figures) for slower in (0.8, 1.2)
    )
    assert (fast["sla_pdd"].verdict, slow["sla_pdd"].verdict) == ("met", "missed")


def test_a_slow_lab_misses_and_does_not_meet_the_sla() -> None:
    experiment, options = Ttft(SMALL), Options(seeds=1)
    parameters, results = simulated_results(experiment, options, slower=1.3)
    found = by_key(experiment.evaluate(parameters, results).figures)
    for key in ("p90_ttft_pdd", "sla_pdd", "sim_p90_ttft_cdc_pd"):
        assert found[key].verdict == "missed", key


def test_a_short_run_judges_nothing_but_its_books() -> None:
    experiment, options = Ttft(), Options(quick=True, seeds=1)
    parameters, results = simulated_results(experiment, options, slower=2.0)
    judged = [one for one in experiment.evaluate(parameters, results).figures if one.verdict != "reported"]
    assert {one.label for one in judged} == {"check"}


@pytest.mark.parametrize("kind", [Ttft, Split, Consistency])
def test_what_is_done_of_an_interrupted_run_is_reported(kind: type[Ttft]) -> None:
    experiment, options = kind(SMALL), Options(seeds=2)
    assert isinstance(find(experiment.name), kind)
    parameters, results = simulated_results(experiment, options)
    whole = {figure.key for figure in experiment.evaluate(parameters, results).figures}
    first = dict(list(results.items())[:1])
    part = {figure.key for figure in experiment.evaluate(parameters, first).figures}
    assert part <= whole


def test_pictures_name_what_they_show() -> None:
    experiment, options = Ttft(SMALL), Options(seeds=1)
    evaluation = experiment.evaluate(*simulated_results(experiment, options))
    assert all(chart.caption and chart.x_label and chart.y_label for chart in evaluation.charts)
    assert all(series.points for chart in evaluation.charts for series in chart.series)
