"""The fit of `ttft` hits what it was fitted to, predicts what it was not, and stands in topologies/paper.yaml."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from experiments.framework.base import ExperimentError
from experiments.framework.directory import edit_topology
from experiments.sim.outcome import Run
from experiments.ttft.fit import (
    FIT_SEEDS,
    TARGET_CDC_P90_S,
    TARGET_CDC_P99_S,
    TARGET_PDD_P90_S,
    TARGET_PDD_P99_S,
    TARGET_SHARE,
    TOPOLOGY,
    Fit,
    as_written,
    figures,
    runs,
    solve,
)
from testbed.topology import load_plan
from testbed.topology.overlay import edited

FIT = Fit.read()


@pytest.fixture(scope="module")
def simulated() -> dict[str, list[Run]]:
    return runs(FIT, ("pdd", "cdc-pd", "idc-pd"), FIT_SEEDS[:6])


def p(found: list[Run], share: float) -> float:
    return fmean(run.ttft_s(share) for run in found) + FIT.lab_adds_s


def test_the_four_fitted_figures_are_hit(simulated: dict[str, list[Run]]) -> None:
    assert p(simulated["pdd"], 0.90) == pytest.approx(TARGET_PDD_P90_S, rel=0.03)
    assert p(simulated["pdd"], 0.99) == pytest.approx(TARGET_PDD_P99_S, rel=0.01)
    assert p(simulated["cdc-pd"], 0.90) == pytest.approx(TARGET_CDC_P90_S, rel=0.03)
    assert fmean(run.relay_share for run in simulated["pdd"]) == pytest.approx(TARGET_SHARE, abs=0.003)


def test_what_was_not_fitted_comes_out_as_published(simulated: dict[str, list[Run]]) -> None:
    assert p(simulated["cdc-pd"], 0.99) == pytest.approx(TARGET_CDC_P99_S, rel=0.05)
    assert p(simulated["idc-pd"], 0.90) == pytest.approx(p(simulated["pdd"], 0.90), rel=0.03)


def test_the_topology_has_the_fitted_values() -> None:
    text = TOPOLOGY.read_text()
    assert edited(TOPOLOGY, as_written(FIT)) == text
    plan = load_plan(TOPOLOGY)
    assert plan.serving["kv_pool"]["connections"] == FIT.connections
    assert sum(host.role == "prefill" for host in plan.hosts) == FIT.prefill_nodes


def test_a_topology_without_a_place_for_a_value_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "paper.yaml"
    file.write_text("profiles: {}\n")
    with pytest.raises(ExperimentError, match="there is no gpu-a here"):
        edit_topology(file, as_written(FIT))
    assert file.read_text() == "profiles: {}\n"


def test_a_refit_comes_back_to_the_figures_from_elsewhere() -> None:
    off = replace(FIT, prefill_tokens_per_s=7000, connection_bytes_per_s=60_000_000, relay_itl_s=0.05)
    found = solve(off, FIT_SEEDS[:2])
    p90, p99, cdc_p90, share = figures(found, FIT_SEEDS[:2])
    assert p90 == pytest.approx(TARGET_PDD_P90_S, rel=0.01)
    assert p99 == pytest.approx(TARGET_PDD_P99_S, rel=0.01)
    assert cdc_p90 == pytest.approx(TARGET_CDC_P90_S, rel=0.01)
    assert share == pytest.approx(TARGET_SHARE, rel=0.01)
