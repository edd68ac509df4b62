"""`chip-bias`: the same prompts for both chips, times in the deployment's units, judged by what was configured."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.chip_bias.experiment import DECODE_SPEED, PREFILL_SHARE, TOPOLOGY, ChipBias
from experiments.chip_bias.runs import AT_ONCE, CHIPS, decoded, prefilled
from experiments.framework.base import Options, Part, PartResult
from testbed.model.scale import Scale
from testbed.topology.load import plan_from_text
from testbed.topology.overlay import laid_over
from tests.conftest import ROOT

SCALE = Scale(256, 4, 2.0)
QUICK = Options(quick=True, seeds=1)


def test_each_variant_has_a_prefill_and_a_main_decode_of_its_chip() -> None:
    for chip in CHIPS:
        plan = plan_from_text(laid_over(TOPOLOGY, ChipBias().variation(chip)), f"{chip}.yaml")
        assert [host.profile for host in plan.hosts] == ["native", chip, chip]


@pytest.mark.parametrize("file", [TOPOLOGY, TOPOLOGY.parent / "paper.yaml"], ids=lambda file: file.stem)
def test_chip_e_is_as_published_wherever_it_stands(file: Path) -> None:
    paces = {}
    for chip in CHIPS:
        plan = plan_from_text(laid_over(file, ChipBias().variation(chip)), file)
        paces[chip] = dict(plan.hosts[1].pace)
    assert paces["gpu-a"]["prefill_token_ns"] / paces["chip-e"]["prefill_token_ns"] == pytest.approx(PREFILL_SHARE)
    assert paces["gpu-a"]["decode_step_ns"] / paces["chip-e"]["decode_step_ns"] == pytest.approx(DECODE_SPEED)


def test_parts_of_a_lab_are_together_and_a_short_run_is_short() -> None:
    made = ChipBias().parts(Options(seeds=2))
    assert [part.variant for part in made] == sorted((part.variant for part in made), key=CHIPS.index)
    assert len({part.name for part in made}) == len(made) == 2 * 2 * (1 + len(AT_ONCE))
    assert sum(part.expected_s for part in ChipBias().parts(QUICK)) < 45
    assert sum(part.expected_s for part in ChipBias().parts(Options())) < 13 * 60


def test_times_are_told_in_the_deployments_tokens_and_seconds() -> None:
    span = {"name": "prefill", "start_ns": 5 * 10**9, "end_ns": 6 * 10**9, "tokens": 110, "cached": 10}
    record: dict[str, Any] = {"pdd_spans": [{"name": "wan-transfer"}, span], "itl": [0.5, 0.2, 0.1]}
    assert prefilled(record, SCALE) == {"prefill_tokens": 25_600, "prefill_s": 2.0}
    assert decoded(record, SCALE)["decode_step_ms"] == pytest.approx(150 * 2 / 4), "the first gap waits for a step"


def _results(chip_prefill_per_s: float = 7290, chip_step_ms: float = 75 / 2.1) -> dict[str, tuple[Part, PartResult]]:
    found = {}
    for part in ChipBias().parts(replace(QUICK, seeds=2)):
        gpu = part.variant == "gpu-a"
        record: dict[str, Any] = {"itl": [0.07] * 4, "decode_step_ms": 75.0 if gpu else chip_step_ms}
        record |= {"prefill_tokens": 25_600, "prefill_s": 25_600 / (9000 if gpu else chip_prefill_per_s)}
        pace = {"md0": {"steps": 200, "late": 1}}
        found[part.name] = (
            part,
            PartResult([record, record], {"bytes_difference": 0.001, "captured_bytes": {}, "pace": pace}),
        )
    return found


def _verdicts(**measured: float) -> dict[str, str]:
    evaluation = ChipBias().evaluate(ChipBias().parameters(QUICK), _results(**measured))
    assert all(figure.label in ("configured", "check") for figure in evaluation.figures)
    return {figure.key: figure.verdict for figure in evaluation.figures}


def test_what_was_configured_is_met() -> None:
    assert set(_verdicts().values()) == {"met", "reported"}


def test_a_chip_that_is_not_as_configured_is_missed() -> None:
    verdicts = _verdicts(chip_prefill_per_s=7290 * 1.03)
    assert (verdicts["prefill_ratio"], verdicts["prefill_chip-e"], verdicts["decode1_ratio"]) == (
        "missed",
        "missed",
        "met",
    )
    verdicts = _verdicts(chip_step_ms=75 / 2.1 * 0.97)
    assert [verdicts[key] for key in ("decode1_ratio", "decode4_ratio", "step_chip-e")] == ["missed"] * 3
    assert verdicts["prefill_ratio"] == "met"


def test_late_steps_are_reported_beside() -> None:
    evaluation = ChipBias().evaluate(ChipBias().parameters(QUICK), _results())
    (late,) = [figure for figure in evaluation.figures if figure.key == "late_steps"]
    assert late.value == 1 / 200


@pytest.mark.root
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_short_run_measures_workers_that_are_never_faster_than_their_chip(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "testbed", "experiment", "run", "chip-bias", "--quick", "--seeds", "1"]
    done = subprocess.run(
        [*command, "--out", str(out), "--json"], cwd=ROOT, capture_output=True, text=True, timeout=560
    )
    assert done.returncode in (0, 1), done.stderr
    summary = json.loads(done.stdout)
    assert summary["complete"]
    figures = {figure["key"]: figure for figure in summary["figures"]}
    assert figures["bytes_difference"]["verdict"] == "met", figures["bytes_difference"]
    for chip in CHIPS:  # how much slower is the machine's business, and the verdict's
        assert figures[f"prefill_{chip}"]["measured"] <= figures[f"prefill_{chip}"]["target"] * 1.001
        assert figures[f"step_{chip}"]["measured"] >= figures[f"step_{chip}"]["target"] * 0.99
    assert (out / "report.html").exists()
