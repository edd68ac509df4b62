"""`cost`: clusters add up, the published figures' own arithmetic, and a short run end to end."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.cost.experiment import BCR, COST_LOW, GOODPUT, Cost, cluster, feasible
from experiments.cost.runs import Load, at_rate, sla_rps
from experiments.framework.base import ExperimentError, Options
from experiments.framework.runner import report, run
from experiments.ttft.fit import Fit

FIT = Fit.read()
LOAD = Load.make(FIT.recipe(1, 300, 32), (1,))
NODES = replace(FIT.deployment(), prefill_nodes=3)


def test_the_published_ratio_belongs_to_the_cheap_end() -> None:
    assert pytest.approx(BCR, abs=0.002) == GOODPUT / COST_LOW


@pytest.mark.parametrize("nodes", [12, 24, 48, 96])
def test_a_price_gives_the_cost_that_it_was_asked_for(nodes: int) -> None:
    of = cluster(nodes, 0.5, relays=3)
    assert of.cost(of.price(COST_LOW)) == pytest.approx(COST_LOW)
    assert of.prefill >= nodes / 2 * GOODPUT
    assert of.relays >= 3


def test_with_half_of_the_nodes_decoding_larger_clusters_leave_more_for_e() -> None:
    prices = [cluster(nodes, 0.5, relays=3).price(COST_LOW) for nodes in (12, 24, 48, 96)]
    assert prices == sorted(prices)
    assert 0 < prices[0] < 0.2
    assert 0.8 < prices[-1] < 1


def test_with_a_quarter_decoding_no_price_is_low_enough() -> None:
    assert not any(feasible(cluster(nodes, 0.25, relays=3), COST_LOW) for nodes in range(8, 400, 4))


def test_the_sla_holds_below_sla_rps_and_not_above() -> None:
    rate, rows = sla_rps(LOAD, "idc-pd", replace(NODES, prefill_tokens_per_s=15_000))
    assert rate > 0
    assert all(row["met"] == (row["rate_per_s"] <= rate) for row in rows)


def test_faster_prefill_serves_more_and_cdc_pd_nothing() -> None:
    slow, fast = (sla_rps(LOAD, "pdd", replace(NODES, prefill_tokens_per_s=v))[0] for v in (11_000, 15_000))
    assert 0 < slow < fast
    assert sla_rps(LOAD, "cdc-pd", NODES)[0] == 0
    assert at_rate(LOAD, "cdc-pd", NODES, 0.01)["met"] is False


def test_a_short_run_needs_no_lab_and_reports_again(tmp_path: Path) -> None:
    out = tmp_path / "cost"
    evaluation = run(Cost(), Options(quick=True, seeds=1), out, "auto", quiet=True)
    assert all(figure.verdict == "reported" for figure in evaluation.figures), "nothing is judged"
    assert report(out).figures == evaluation.figures
    assert "What E may cost" in (out / "report.html").read_text()
    with pytest.raises(ExperimentError, match="other parameters"):
        run(Cost(), Options(quick=False, seeds=1), out, "auto", quiet=True)
