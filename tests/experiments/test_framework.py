"""Figures, verdicts, the queue, charts and pages: the arithmetic and the text of every experiment's report."""

import math
import re
import statistics
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from experiments.framework.base import ExperimentError, Part, PartResult
from experiments.framework.directory import RunDirectory
from experiments.framework.figures import Figure, interval_95, percentile, within
from experiments.framework.registry import EXPERIMENTS, find
from experiments.framework.runner import unfaithful_reasons
from experiments.report.charts import Chart, Mark, Series, cdf, figure
from experiments.report.timeline import timeline
from experiments.skew.fit import even_arrivals, waits

VERIFIED = {"links": [{"name": "wan0", "ok": True}], "reasons": []}


def test_a_figure_is_met_at_its_bounds_and_missed_beyond() -> None:
    assert within("k", "t", "ms", [110.0], 100, 0.10, "fitted").verdict == "met"
    assert within("k", "t", "ms", [110.2], 100, 0.10, "fitted").verdict == "missed"
    assert within("k", "t", "ms", [], 100, 0.10, "fitted").verdict == "reported"
    assert Figure("k", "t", "ms", (math.nan,), "predicted", 1.0, 0.0, 2.0).verdict == "missed"


def test_the_interval_is_students() -> None:
    # R: t.test(c(10, 12, 14))$conf.int
    low, high = interval_95([10.0, 12.0, 14.0]) or (0.0, 0.0)
    assert (round(low, 3), round(high, 3)) == (7.031, 16.969)
    assert interval_95([1.0]) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    for share, expected in zip((0.25, 0.5, 0.75), quartiles, strict=True):
        assert math.isclose(percentile(values, share), expected, rel_tol=1e-9, abs_tol=1e-6)


def test_nobody_waits_while_a_server_is_free() -> None:
    assert waits([0, 0, 0], [5, 5, 5], 3) == [0, 0, 0]


def test_a_full_pool_serves_first_come_first() -> None:
    assert waits([0, 0, 1, 1], [10, 4, 1, 1], 2) == [0, 0, 3, 4]


@given(st.lists(st.floats(0.1, 5), min_size=1, max_size=60), st.floats(0.05, 2), st.integers(1, 9))
def test_never_more_than_the_servers_are_busy(holds: list[float], spacing: float, servers: int) -> None:
    arrivals = even_arrivals(len(holds), spacing)
    waited = waits(arrivals, holds, servers)
    starts = [arrival + wait for arrival, wait in zip(arrivals, waited, strict=True)]
    assert all(one <= other + 1e-9 for one, other in pairwise(starts)), "overtaken"
    for at in starts:
        busy = sum(start <= at < start + hold - 1e-9 for start, hold in zip(starts, holds, strict=True))
        assert busy <= servers


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_found_and_says_what_it_claims(name: str) -> None:
    found = find(name)
    assert found.name == name
    assert found.claim


def test_an_unknown_experiment_is_one_sentence() -> None:
    with pytest.raises(ExperimentError, match=r'no experiment "skwe"; there are: .*skew, delta'):
        find("skwe")


def test_a_part_is_done_when_it_is_kept_and_comes_back_as_it_was(tmp_path: Path) -> None:
    directory, part = RunDirectory(tmp_path), Part("a-seed1", 1, 3.0, {"row": "a"})
    assert not directory.is_done("a-seed1")
    directory.keep(part, PartResult([{"x": 1}], {"f": 2}, ["late"]))
    assert directory.is_done("a-seed1")
    back, result = directory.load("a-seed1")
    assert (back, result.records, result.facts, result.reasons) == (part, [{"x": 1}], {"f": 2}, ["late"])
    (tmp_path / "parts" / "a-seed1" / "requests.jsonl").write_text('{"x": ')
    with pytest.raises(ExperimentError, match="remove it, and run again"):
        directory.load("a-seed1")


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"no run's directory"):
        RunDirectory(tmp_path).run()


def test_a_run_is_faithful_only_when_everything_says_so() -> None:
    lab = {"parts": ["a"], "verified_before": VERIFIED, "verified_after": VERIFIED}
    done = {"a": (Part("a", 1, 1.0), PartResult([], {}))}
    assert unfaithful_reasons({"parts": ["a"], "labs": [lab]}, done) == []
    assert unfaithful_reasons({"parts": ["a", "b"], "labs": [lab]}, done) == ["1 of 2 parts are not done"]
    unverified = {**lab, "verified_after": None}
    assert unfaithful_reasons({"parts": ["a"], "labs": [unverified]}, done) == ["the links were not verified after a"]
    late = {**lab, "verified_after": {"links": [{"name": "wan0", "ok": False}], "reasons": ["the relay was late"]}}
    found = unfaithful_reasons({"parts": ["a"], "labs": [late]}, done)
    assert found == ["the relay was late (after the run)", "wan wan0 out of tolerance after the run"]
    doubtful = {"a": (Part("a", 1, 1.0), PartResult([], {}, ["bytes differ"]))}
    assert unfaithful_reasons({"parts": ["a"], "labs": [lab]}, doubtful) == ["a: bytes differ"]


VALUES = st.floats(-1e6, 1e6) | st.floats(-1e300, 1e300)
POINTS = st.lists(st.tuples(VALUES, VALUES), max_size=30)


@example([(0.0, 5e-324)], False, "line")
@example([(1e20, 1e20), (1e20, 1.0000000000000001e20)], True, "dots")
@given(POINTS, st.booleans(), st.sampled_from(["line", "step", "dots"]))
def test_any_chart_is_well_formed_and_stays_on_its_canvas(
    points: list[tuple[float, float]], x_log: bool, style: str
) -> None:
    chart = Chart("a < b & c", "x", "y", [Series("s <1>", points, style)], [Mark(5.0, "here")], x_log)
    drawn = figure(chart)
    ElementTree.fromstring(drawn)
    numbers = re.findall(r'(?:x1|x2|cx)="([-\d.]+)"', drawn)
    assert all(-1 <= float(number) <= 761 for number in numbers)


def test_a_cdf_ends_at_one_hundred_percent() -> None:
    assert cdf("s", [3.0, 1.0, 2.0, 2.0]).points == [(1.0, 0.0), (1.0, 25.0), (2.0, 50.0), (2.0, 75.0), (3.0, 100.0)]


def test_slices_of_one_thread_never_overlap() -> None:
    def record(name: str, start: int, end: int) -> dict[str, object]:
        return {"request_id": name, "pdd_spans": [{"name": "kv", "start_ns": start, "end_ns": end, "bytes": 7}]}

    records = [record("a", 0, 10), record("b", 5, 15), record("c", 10, 20), record("d", 12, 13)]
    events = timeline({"p": (Part("p", 1, 1.0), PartResult(records, {}))})["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 4
    assert slices[0]["args"] == {"request": "a", "bytes": 7}
    for one in slices:
        for other in slices:
            if one is not other and one["tid"] == other["tid"]:
                assert one["ts"] + one["dur"] <= other["ts"] or other["ts"] + other["dur"] <= one["ts"]
