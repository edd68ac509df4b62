"""Variants of a topology are values that are laid over it; a path that leads nowhere is an error that names it."""

from pathlib import Path

import pytest

from testbed.topology.load import plan_from_text
from testbed.topology.overlay import edited, laid_over
from testbed.topology.problems import TopologyErrors
from tests.conftest import ROOT

FILE = ROOT / "topologies" / "two-dc-tiny.yaml"
TEXT = FILE.read_text()


def test_an_overlay_of_nothing_is_the_same_lab() -> None:
    assert plan_from_text(laid_over(FILE, {}), FILE) == plan_from_text(TEXT, FILE)


def test_values_replace_and_add_what_they_name() -> None:
    overlay = {
        "wan.wan0.rate": "10mbit",
        "datacenters.main.fabric": {"mtu": 9000},
        "serving": {"end_on_rld": True, "block_size": 8},
    }
    plan = plan_from_text(laid_over(FILE, overlay), FILE)
    assert plan.wans[0].forward.rate_bps == 10_000_000
    assert (plan.serving["end_on_rld"], plan.serving["block_size"]) == (True, 8)
    assert plan_from_text(TEXT, FILE).wans[0].forward.rate_bps == 400_000_000


def test_every_path_that_leads_nowhere_is_told_with_what_is_there() -> None:
    overlay = {"wan.wan1.rate": "1mbit", "datacenters.main.hosts.p9.role": "prefill", "name.of": "x", "seed": 2}
    with pytest.raises(TopologyErrors) as caught:
        laid_over(FILE, overlay)
    found = {problem.path: problem.message for problem in caught.value.problems}
    assert found["wan.wan1"] == "an overlay sets wan.wan1.rate; there is no wan1 here, but wan0"
    assert "there is no p9 here, but gw0, p0" in found["datacenters.main.hosts.p9"]
    assert "nothing" in found["name.of"]
    assert len(found) == 3


def test_a_value_that_no_topology_has_is_refused_when_the_variant_is_loaded() -> None:
    with pytest.raises(TopologyErrors, match=r"serving\.handof"):
        plan_from_text(laid_over(FILE, {"serving": {"handof": "auto"}}), FILE)


def test_an_edited_text_keeps_everything_but_the_values(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("# why\na: {b: 1ms, c: 22 tokens/s}  # here\nwan: [{name: w, rate: 1mbit}]\n")
    found = edited(file, {"a.c": "3 tokens/s", "wan.w.rate": "400mbit", "a.b": "10ms"})
    assert found == "# why\na: {b: 10ms, c: 3 tokens/s}  # here\nwan: [{name: w, rate: 400mbit}]\n"


def test_what_is_not_there_cannot_be_edited(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("a: {b: 1ms}\n")
    with pytest.raises(TopologyErrors, match=r"a\.d: there is no value to be replaced"):
        edited(file, {"a.d": "1", "a.b": "2"})
