"""Running an experiment: a lab, its parts one after the other, and the run's files. Resumes what was interrupted."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from experiments.framework import machine
from experiments.framework.base import Computation, Evaluation, Experiment, ExperimentError, Options, Part, PartResult
from experiments.framework.directory import RunDirectory, take_over, write_json, write_whole
from experiments.framework.figures import Figure
from experiments.framework.lab import ExperimentLab
from experiments.framework.links import reasons_of as changed_by_hand
from experiments.framework.progress import RunProgress
from experiments.framework.registry import find_reported
from experiments.report.charts import Chart, svg
from testbed.lab.messages import VerificationResult
from testbed.topology import TopologyErrors
from testbed.topology.overlay import Overlay, laid_over

VERIFY_AGAIN = 2  # times; the verification after the run covers the lab's whole life and is not repeated


def run(
    experiment: Experiment,
    options: Options,
    path: Path,
    driver: str,
    *,
    source: Path | None = None,
    quiet: bool = False,
) -> Evaluation:
    """Run what is not done yet, here or in the run at `source`, and report.

    Raises ExperimentError; what is done by then is kept.
    """
    directory = RunDirectory(path)
    parts = experiment.parts(options)
    about = _begin(experiment, options, directory)
    if source is not None:
        take_over(experiment, about, directory, parts, source)
    left = [part for part in parts if not directory.is_done(part.name)]
    with RunProgress(left, quiet) as progress:
        if left or about["finished"] is None:
            if isinstance(experiment, Computation):
                _compute_parts(experiment, directory, left, progress)
                left = []
            for variant, group in groupby(left, key=lambda part: part.variant):
                _run_parts(experiment, options, directory, about, list(group), variant, driver, progress)
            about["finished"] = time.time()
            directory.write_run(about)
        progress.step("writing the report")
        return report(path)


def _begin(experiment: Experiment, options: Options, directory: RunDirectory) -> dict[str, Any]:
    """run.json of a new run, or of the one that is resumed. Raises ExperimentError."""
    parameters = json.loads(json.dumps(experiment.parameters(options)))  # as run.json has them
    if directory.run_file.exists():
        about = directory.run()
        if (about["experiment"], about["parameters"]) != (experiment.name, parameters):
            raise ExperimentError(
                f"{directory.path} holds a run of {about['experiment']} with other parameters; choose another --out"
            )
        return about
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        topology = experiment.topology(options).read_text()
    except OSError as error:
        raise ExperimentError(f"cannot begin a run in {directory.path}: {error.strerror}") from None
    about = {
        "experiment": experiment.name,
        "title": experiment.title,
        "claim": experiment.claim,
        "quick": options.quick,
        "seeds": options.seeds,
        "parameters": parameters,
        "parts": [part.name for part in experiment.parts(options)],
        "topology": topology,
        "versions": machine.versions(),
        "machine": machine.machine(),
        "started": time.time(),
        "finished": None,
        "labs": [],
    }
    directory.write_run(about)
    return about


def _run_parts(
    experiment: Experiment,
    options: Options,
    directory: RunDirectory,
    about: dict[str, Any],
    parts: list[Part],
    variant: str,
    driver: str,
    progress: RunProgress,
) -> None:
    """Parts of one variant, in one lab."""
    topology = experiment.topology(options)
    if variant:
        topology = _varied(topology, experiment.variation(variant), directory.path / f"topology-{variant}.yaml")
    with ExperimentLab(
        topology,
        directory.path / "lab",
        with_workers=experiment.with_workers,
        driver=driver,
        on_step=progress.step,
    ) as lab:
        in_lab: dict[str, Any] = {
            "variant": variant,
            "driver": lab.state["driver"],
            "applied": lab.state["applied"],
            "settings": {},
            "changes": {},
            "verified_before": _verify_before(lab),
            "verified_after": None,
            "versions": machine.versions(),
            "machine": machine.machine(),
            "parts": [],
        }
        about["labs"].append(in_lab)
        progress.step("connecting")
        with experiment.session(lab, options) as session:
            for part in parts:
                progress.begin(part)
                settings = lab.settings()
                in_lab["settings"] = in_lab["settings"] or settings.begin
                folder = directory.part(part.name)
                folder.mkdir(parents=True, exist_ok=True)
                with lab.watching(directory.links, part.name) as watch:
                    result = session.run(part, folder, progress.advance)
                in_lab["changes"][part.name] = settings.changes()
                result = replace(result, reasons=[*result.reasons, *watch.reasons()])
                in_lab["verified_after"] = lab.verify()  # after each part: it covers the lab's life until then
                in_lab["parts"].append(part.name)
                directory.write_run(about)
                directory.keep(part, result)
                progress.end()


def _varied(topology: Path, variation: Overlay, file: Path) -> Path:
    """A variant's topology, written to `file`. Raises ExperimentError."""
    try:
        write_whole(file, laid_over(topology, variation))
    except TopologyErrors as errors:
        raise ExperimentError(str(errors)) from None
    return file


def _compute_parts(
    experiment: Computation, directory: RunDirectory, parts: Sequence[Part], progress: RunProgress
) -> None:
    for part in parts:
        progress.begin(part)
        directory.keep(part, experiment.compute(part, progress.advance))
        progress.end()


def _verify_before(lab: ExperimentLab) -> VerificationResult | None:
    """Verification by `up`; anew where the machine was too busy at that moment, which is then forgotten."""
    verified: VerificationResult | None = lab.state["verified"]
    for _ in range(VERIFY_AGAIN):
        if verified is not None and verified["ok"] and verified["faithful"]:
            break
        verified = lab.verify(anew=True)
    return verified


def evaluated(directory: RunDirectory) -> tuple[dict[str, Any], dict[str, tuple[Part, PartResult]], Evaluation]:
    """run.json with its verdict as of now, the parts that are done, what they come to. Raises ExperimentError.

    Of a directory without its parts, as results are committed: the figures of its summary, and no part.
    """
    about = directory.run()
    experiment = find_reported(about["experiment"])
    results = {name: directory.load(name) for name in about["parts"] if directory.is_done(name)}
    if not results:
        return about, {}, _summarised(directory, about)
    reasons = unfaithful_reasons(about, results)
    about["faithful"], about["reasons"] = not reasons, reasons
    try:
        return about, results, experiment.evaluate(about["parameters"], results)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        words = f"the parts of {directory.path} are not those of {about['experiment']} as this version knows them"
        raise ExperimentError(f"{words} ({error!r:.100}); evaluate it with the version in its run.json") from None


def _summarised(directory: RunDirectory, about: dict[str, Any]) -> Evaluation:
    """As the run was reported when its parts were there; completes `about` by it. Raises ExperimentError."""
    path = directory.path
    if not (path / "summary.json").exists():
        raise ExperimentError(f"{path} has no part that is done; run it again with --out {path}")
    summary = directory.summary()
    for key, default in (("faithful", False), ("reasons", [])):
        about.setdefault(key, summary.get(key, default))
    try:
        figures = [Figure.of_row(row) for row in summary["figures"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ExperimentError(f"{path / 'summary.json'} has figures that cannot be read ({error!r})") from None
    note = f"The parts of {path} are not there: these are its figures as they were reported, not evaluated again."
    return Evaluation(figures, notes=[note], summary=summary)


def report(path: Path) -> Evaluation:
    """Evaluate what is done and write the run's files anew; nothing is written where the parts are not there.

    Raises ExperimentError.
    """
    from experiments.report.page import page
    from experiments.report.timeline import timeline

    directory = RunDirectory(path)
    about, results, evaluation = evaluated(directory)
    if not results:
        return evaluation
    directory.write_run(about)
    directory.write_records(results.values())
    reasons = about["reasons"]
    summary = {
        "experiment": about["experiment"],
        "complete": len(results) == len(about["parts"]),
        "faithful": not reasons,
        "reasons": reasons,
        "figures": [figure.row() for figure in evaluation.figures],
        **evaluation.summary,
    }
    write_json(path / "summary.json", summary)
    write_json(path / "timeline.json", timeline(results))
    write_charts(path / "charts", evaluation.charts)
    write_whole(path / "report.html", page(about, summary, evaluation, directory.links))
    return evaluation


def write_charts(directory: Path, charts: Sequence[Chart]) -> None:
    """Each as an SVG file, named after its title."""
    directory.mkdir(exist_ok=True)
    for chart in charts:
        if any(series.points for series in chart.series):
            name = re.sub("[^a-z0-9]+", "-", chart.title.lower()).strip("-")
            write_whole(directory / f"{name}.svg", svg(chart) + "\n")


def unfaithful_reasons(about: Mapping[str, Any], results: Mapping[str, tuple[Part, PartResult]]) -> list[str]:
    """Reasons why this run's figures are not to be trusted; empty when they are."""
    reasons = []
    for lab in about["labs"]:
        for when, verified in (("before", lab["verified_before"]), ("after", lab["verified_after"])):
            if verified is None:
                if lab["parts"]:
                    reasons.append(f"the links were not verified {when} {', '.join(lab['parts'])}")
                continue
            reasons += [f"{reason} ({when} the run)" for reason in verified["reasons"]]
            reasons += [
                f"wan {link['name']} out of tolerance {when} the run" for link in verified["links"] if not link["ok"]
            ]
    reasons += changed_by_hand(about["labs"])
    for name, (_, result) in results.items():
        reasons += [f"{name}: {reason}" for reason in result.reasons]
        reasons += [] if about.get("experiment") == "bench" else [f"{name}: {reason}" for reason in _recovered(result)]
    if len(results) < len(about["parts"]):
        reasons.append(f"{len(about['parts']) - len(results)} of {len(about['parts'])} parts are not done")
    return list(dict.fromkeys(reasons))


def _recovered(result: PartResult) -> list[str]:
    """Reason that requests lost a worker: what they measured is then not the pipeline that the part asked for."""
    lost = [record for record in result.records if record.get("pdd_recovery") or record.get("pdd_replays")]
    return [f"requests that lost a worker and went on elsewhere or again: {len(lost)}"] if lost else []
