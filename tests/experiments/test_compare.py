"""`pddbed compare`: figures of runs side by side, from directories as runs leave them."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from experiments.cli.compare import compare
from experiments.cli.experiment import report
from experiments.framework.base import Evaluation, Options, PartResult
from experiments.framework.directory import RunDirectory
from experiments.framework.figures import Figure
from experiments.modes.experiment import Modes
from experiments.report.charts import Chart, Series
from experiments.report.compare import Compared, change, differences, keys, overlaid
from tests.conftest import ROOT

RESULTS = ROOT / "results"
ABOUT: dict[str, Any] = {
    "parameters": {"a": {"b": 1}, "c": 2},
    "seeds": 3,
    "labs": [{"driver": "userspace"}],
    "machine": {"cpu": "x", "cpus": 2, "kernel": "6"},
}


def figure_of(*values: float, key: str = "k") -> Figure:
    return Figure(key, "words", "ms", values, "check")


@pytest.mark.parametrize(
    ("first", "other", "relative", "apart"),
    [
        ((100.0,), (110.0,), 0.1, None),
        ((100.0, 101.0, 102.0), (202.0, 201.0, 203.0), 1.0, True),
        ((100.0, 80.0, 120.0), (110.0, 90.0, 130.0), 0.1, False),
        ((100.0, 101.0), (110.0,), 0.0945, None),
        ((0.0,), (0.0,), 0.0, None),
        ((0.0,), (5.0,), None, None),
    ],
)
def test_a_change_is_relative_and_says_whether_it_may_be_chance(
    first: tuple[float, ...], other: tuple[float, ...], relative: float | None, apart: bool | None
) -> None:
    found = change(figure_of(*first), figure_of(*other))
    assert found is not None
    assert found.relative == pytest.approx(relative, abs=1e-3)
    assert found.apart is apart


def test_a_figure_without_a_value_has_no_change() -> None:
    assert change(figure_of(), figure_of(1.0)) is None


def test_figures_of_all_runs_are_there_once_and_charts_of_all_lie_over_each_other() -> None:
    line = Chart("both", "x", "y", [Series("s", [(0.0, 1.0)])])
    one = Compared("one", ABOUT, Evaluation([figure_of(1.0, key="a"), figure_of(1.0, key="b")], [line]))
    alone = Chart("alone", "x", "y", [])
    other = Compared("two", ABOUT, Evaluation([figure_of(1.0, key="b"), figure_of(1.0, key="c")], [line, alone]))
    assert keys([one, other]) == ["a", "b", "c"]
    (chart,) = overlaid([one, other])
    assert [series.name for series in chart.series] == ["one: s", "two: s"]


def test_what_was_asked_differently_is_told_by_its_whole_name() -> None:
    changed = {**ABOUT, "parameters": {"a": {"b": 5}, "c": 2}, "labs": [{"driver": "netem"}]}
    runs = [Compared("one", ABOUT, Evaluation([])), Compared("two", changed, Evaluation([]))]
    assert differences(runs) == [("a.b", ["1", "5"]), ("WAN driver", ["userspace", "netem"])]


# -- directories ---------------------------------------------------------------------------------------------------


def run_in(path: Path, catch_up_ms: float, topology: str = "name: a\n") -> Path:
    """A run of `modes` with two seeds, in which one-shot takes 100 ms and auto is in the middle."""
    options = Options(seeds=2)
    directory, parts = RunDirectory(path), Modes().parts(options)
    takes = {"catch-up": catch_up_ms, "one-shot": 100.0, "auto": (catch_up_ms + 100) / 2}
    for part in parts:
        record = {"e2el_ms": takes[part.variant] + part.seed, "pdd_md_tokens": 1, "success": True}
        facts = {"bytes_difference": 0.0, "captured_bytes": {}, "pace": {}}
        directory.keep(part, PartResult([record], facts))
    verified = {"links": [], "reasons": [], "ok": True, "faithful": True}
    names = [part.name for part in parts]
    lab = {"driver": "userspace", "parts": names, "verified_before": verified, "verified_after": verified}
    directory.write_run(
        {
            "experiment": "modes",
            "parameters": Modes().parameters(options),
            "seeds": 2,
            "parts": names,
            "topology": topology,
            "machine": ABOUT["machine"],
            "labs": [lab],
        }
    )
    return path


def run_compare(*arguments: Any) -> Result:
    return CliRunner().invoke(compare, list(map(str, arguments)), catch_exceptions=False)


def test_two_runs_as_json_as_a_table_and_as_a_page(tmp_path: Path) -> None:
    near, far = run_in(tmp_path / "near", 100), run_in(tmp_path / "far", 300, "name: b <far>\n")
    before = sorted(path.name for path in near.iterdir())
    told = json.loads(run_compare(near, far, "--json").stdout)
    assert (told["experiment"], told["runs"], told["faithful"]) == ("modes", ["near", "far"], [True, True])
    found = told["figures"]["e2el_ms_catch-up_load4"]
    assert found["values"] == [101.5, 301.5]
    assert found["changes"] == [pytest.approx(1.9704, abs=1e-3)]
    assert found["apart"] == [True]
    assert told["figures"]["e2el_ms_one-shot_load4"]["apart"] == [False]
    page = tmp_path / "page.html"
    text = run_compare(near, far, "--out", page).stdout
    assert "Their topology files differ" in text
    assert any("catch-up, mean" in line and "+197.0%" in line for line in text.splitlines())
    written = page.read_text()
    assert "near: catch-up" in written
    assert "far: catch-up" in written
    assert "+name: b &lt;far&gt;" in written, "what differs between the files, escaped"
    assert RunDirectory(near).run().get("faithful") is None, "the directories stay as they are"
    assert sorted(path.name for path in near.iterdir()) == before


def test_directories_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    one, other = run_in(tmp_path / "a" / "run", 100), run_in(tmp_path / "b" / "run", 100)
    assert json.loads(run_compare(one, other, "--json").stdout)["runs"] == [str(one), str(other)]


def test_what_cannot_be_compared_is_one_sentence(tmp_path: Path) -> None:
    one = run_in(tmp_path / "one", 100)
    for arguments, status, said in (
        ([one], 2, "compares with nothing"),
        ([one, tmp_path / "." / "one"], 2, "named twice"),
        ([one, tmp_path / "none"], 1, "is no run's directory"),
    ):
        result = run_compare(*arguments)
        assert (result.exit_code, said in result.output) == (status, True), result.output
    result = run_compare(RESULTS / "modes", RESULTS / "skew")
    assert (result.exit_code, "runs of modes and skew have no figures in common" in result.output) == (1, True)
    other = run_in(tmp_path / "other", 100)
    about = RunDirectory(other).run()
    RunDirectory(other).write_run({**about, "experiment": "skew"})
    result = run_compare(one, other)
    assert (result.exit_code, "are not those of skew as this version knows them" in result.output) == (1, True)


def test_requests_that_lost_a_worker_make_a_part_unfaithful(tmp_path: Path) -> None:
    one, other = run_in(tmp_path / "one", 100), run_in(tmp_path / "other", 100)
    directory = RunDirectory(other)
    part, result = directory.load(RunDirectory(other).run()["parts"][0])
    records = [{**record, "pdd_recovery": [{"error": "out_of_kv_blocks"}]} for record in result.records]
    directory.keep(part, PartResult(records, result.facts, result.reasons))
    said = " ".join(run_compare(one, other).output.split())
    assert f"{part.name}: requests that lost a worker and went on elsewhere or again: {len(records)}" in said


def test_an_unfaithful_run_says_so(tmp_path: Path) -> None:
    one, other = run_in(tmp_path / "one", 100), run_in(tmp_path / "other", 100)
    about = RunDirectory(other).run()
    about["labs"][0]["verified_after"]["reasons"] = ["the relay was late"]
    RunDirectory(other).write_run(about)
    assert "other is unfaithful: the relay was late (after the run)" in run_compare(one, other).output


# -- what is committed, of this version and of older ones ----------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.parent.name for path in RESULTS.glob("*/run.json")))
def test_committed_results_are_reported_as_they_were_and_left_alone(name: str) -> None:
    path = RESULTS / name
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    summary = json.loads((path / "summary.json").read_text())
    result = CliRunner().invoke(report, [str(path)])
    missed = any(figure["verdict"] == "missed" for figure in summary["figures"])
    assert result.exit_code == (1 if missed or not summary["faithful"] else 0), result.output
    assert summary["figures"][0]["figure"].split()[0] in result.output
    assert "are not there: these are its figures as they were reported" in " ".join(result.output.split())
    again = CliRunner().invoke(report, [str(path), "--json"])
    assert json.loads(again.output) == summary
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


def test_committed_results_are_compared_those_of_other_experiments_by_what_they_share(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run_compare(RESULTS / "ttft", RESULTS / "split", "--out", page)
    assert result.exit_code == 0, result.output
    assert "PDD TTFT P90" in result.output
    assert "+0.0%" in result.output
    assert "PDD TTFT P90" in page.read_text()
    as_json = json.loads(run_compare(RESULTS / "consistency", RESULTS / "ttft", "--json").output)
    assert as_json["runs"] == ["consistency", "ttft"]


def test_a_run_without_parts_and_summary_or_with_a_damaged_one_is_one_sentence(tmp_path: Path) -> None:
    run_in(tmp_path, 100)
    for part in (tmp_path / "parts").rglob("part.json"):
        part.unlink()
    for text, said in (
        (None, "has no part that is done"),
        ("{", "summary.json cannot be read"),
        ("[]", "is no summary"),
        ('{"figures": [{"key": 1}]}', "has figures that cannot be read"),
        ("{}", "has figures that cannot be read"),
    ):
        if text is not None:
            (tmp_path / "summary.json").write_text(text)
        result = CliRunner().invoke(report, [str(tmp_path)])
        assert (result.exit_code, said in result.output) == (1, True), result.output
        assert "Traceback" not in result.output


def test_settings_of_the_links_and_their_changes_are_what_was_asked_differently() -> None:
    told = {"known": True, "by": {"hand": 4}, "changes": []}
    change_of = {"by": "hand", "link": "wan0", "direction": "forward", "asked": "no rate limit, 200ms"}
    told["changes"] = [{**change_of, "after_s": 1.5 + at} for at in range(4)]
    near = {"driver": "userspace", "settings": {"wan0 forward": "400mbit, 20ms"}, "changes": {}}
    far = {"driver": "userspace", "settings": {"wan0 forward": "400mbit, 200ms"}, "changes": {"bench": told}}
    runs = [Compared(name, {**ABOUT, "labs": [lab]}, Evaluation([])) for name, lab in (("near", near), ("far", far))]
    found = dict(differences(runs))
    assert found["link wan0 forward"] == ["400mbit, 20ms", "400mbit, 200ms"]
    assert found["links changed meanwhile"][0] == "-"
    assert found["links changed meanwhile"][1].startswith("wan0 forward to no rate limit, 200ms after 1.5 s, ")
    assert found["links changed meanwhile"][1].endswith(", 1 more")
