"""`--from`: what a run of `ttft` has done is what `split` and `consistency` would do, and is not done again."""

import json
from pathlib import Path

import pytest

from experiments.framework.base import ExperimentError, Options
from experiments.framework.directory import RunDirectory
from experiments.framework.runner import run
from experiments.ttft.experiment import Consistency, Split, Ttft
from experiments.ttft.load import Shape
from tests.experiments.ttft.test_experiment import SMALL, simulated_results

OPTIONS = Options(seeds=2)
MACHINE = {"cpu": "x", "cpus": 2, "kernel": "6", "memory_bytes": 2**30, "load": [0.0, 0.0, 0.0]}


def ttft_run(path: Path, done: int | None = None, shape: Shape = SMALL) -> Path:
    """As `ttft` leaves it, its first parts done; each variant had a lab."""
    experiment = Ttft(shape)
    directory, (parameters, results) = RunDirectory(path), simulated_results(experiment, OPTIONS)
    path.mkdir()
    kept = dict(list(results.items())[:done])
    for part, result in kept.values():
        directory.keep(part, result)
    verified = {"links": [], "reasons": [], "ok": True, "faithful": True}
    labs = {}
    for part, _ in kept.values():
        empty = {"driver": "userspace", "verified_before": verified, "verified_after": verified, "parts": []}
        labs.setdefault(part.variant, {"variant": part.variant, **empty})["parts"].append(part.name)
    rows = [{"part": name, "link": "wan0", "direction": "forward", "bytes": 1} for name in results]
    directory.links.write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = {
        "experiment": "ttft",
        "title": "",
        "claim": "",
        "quick": False,
        "seeds": 2,
        "topology": "",
        "finished": 1.0,
    }
    machine = {"versions": {}, "machine": MACHINE, "started": 0.0}
    directory.write_run(
        about | machine | {"parameters": parameters, "parts": list(results), "labs": list(labs.values())}
    )
    return path


@pytest.mark.parametrize("kind", [Split, Consistency, Ttft])
def test_a_run_is_made_of_what_ttft_has_done_and_raises_no_lab(kind: type[Ttft], tmp_path: Path) -> None:
    source, out = ttft_run(tmp_path / "ttft"), tmp_path / "out"
    experiment = kind(SMALL)
    evaluation = run(experiment, OPTIONS, out, "auto", source=source, quiet=True)
    assert {figure.key for figure in evaluation.figures} >= {"rld_share", "behind_handover", "bytes_difference"}
    about, names = RunDirectory(out).run(), [part.name for part in experiment.parts(OPTIONS)]
    assert about["faithful"], about["reasons"]
    assert [lab["parts"] for lab in about["labs"]] == [names[at : at + 2] for at in range(0, len(names), 2)]
    assert {json.loads(line)["part"] for line in (out / "links.jsonl").read_text().splitlines()} == set(names)
    assert about["finished"] is not None
    assert str(source) in (out / "report.html").read_text(), "the report says where its parts are from"
    first = (out / "parts" / names[0] / "requests.jsonl").read_text()
    assert first == (source / "parts" / names[0] / "requests.jsonl").read_text()


def test_only_parts_that_are_done_and_the_same_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = ttft_run(tmp_path / "ttft", done=1), tmp_path / "out"
    asked = []
    monkeypatch.setattr("experiments.framework.runner._run_parts", lambda *given: asked.append(given[4]))
    run(Split(SMALL), OPTIONS, out, "auto", source=source, quiet=True)
    assert [[part.name for part in parts] for parts in asked] == [["pdd-seed2"]], "the other one is run"


def test_a_run_of_other_parameters_is_refused_and_nothing_is_taken(tmp_path: Path) -> None:
    source = ttft_run(tmp_path / "ttft", shape=Shape(80, 16, 256, 8, 16))
    out = tmp_path / "out"
    with pytest.raises(ExperimentError, match="holds a run of ttft with other parameters"):
        run(Split(SMALL), OPTIONS, out, "auto", source=source, quiet=True)
    assert not (out / "parts").exists()
    with pytest.raises(ExperimentError, match="is no run's directory"):
        run(Split(SMALL), OPTIONS, out, "auto", source=tmp_path / "none", quiet=True)
