"""A run's directory: parts as they are done, and the files that docs/experiments.md names, made from them.

    run.json         topology, seeds, parameters, trace hashes, versions, machine, verification, faithful or why not
    requests.jsonl   a line per request        links.jsonl   a row per link and second
    summary.json     figures and flat names    report.html   tables and plots, self-contained
    timeline.json    opens in Perfetto         parts/NAME/   what an interrupted run resumes from

Files are replaced whole, so that an interrupted run never leaves half of one.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.framework.base import Experiment, ExperimentError, Part, PartResult
from testbed.topology import TopologyErrors
from testbed.topology.overlay import edited

FORMAT = 1


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step. Raises ExperimentError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ExperimentError(f"cannot write {path}: {error.strerror}; make room there, and run it again") from None


def edit_topology(file: Path, values: Mapping[str, str]) -> None:
    """Write other values into a topology, whose comments stay. Raises ExperimentError."""
    try:
        write_whole(file, edited(file, values))
    except TopologyErrors as errors:
        raise ExperimentError(f"{errors}; correct it by hand") from None


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1, default=str) + "\n")


class RunDirectory:
    """One run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def run_file(self) -> Path:
        return self.path / "run.json"

    @property
    def links(self) -> Path:
        return self.path / "links.jsonl"

    def part(self, name: str) -> Path:
        return self.path / "parts" / name

    def run(self) -> dict[str, Any]:
        """run.json. Raises ExperimentError."""
        try:
            value = json.loads(self.run_file.read_text())
        except FileNotFoundError:
            raise ExperimentError(f"{self.path} is no run's directory: it has no run.json") from None
        except (OSError, ValueError) as error:
            raise ExperimentError(f"{self.run_file} cannot be read ({error})") from None
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ExperimentError(f"{self.run_file} is not of this version of pddbed")
        return value

    def summary(self) -> dict[str, Any]:
        """summary.json. Raises ExperimentError."""
        file = self.path / "summary.json"
        try:
            value = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ExperimentError(f"{file} cannot be read ({error})") from None
        if not isinstance(value, dict):
            raise ExperimentError(f"{file} is no summary of a run")
        return value

    def write_run(self, run: Mapping[str, Any]) -> None:
        write_json(self.run_file, {"format": FORMAT, **run})

    def is_done(self, name: str) -> bool:
        return (self.part(name) / "part.json").exists()

    def keep(self, part: Part, result: PartResult) -> None:
        """The part is done. part.json is written last: it says so."""
        directory = self.part(part.name)
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / "requests.jsonl", "".join(json.dumps(row) + "\n" for row in result.records))
        done = {"part": asdict(part), "facts": dict(result.facts), "reasons": list(result.reasons)}
        write_json(directory / "part.json", done)

    def load(self, name: str) -> tuple[Part, PartResult]:
        """A part that is done. Raises ExperimentError."""
        directory = self.part(name)
        try:
            done = json.loads((directory / "part.json").read_text())
            lines = (directory / "requests.jsonl").read_text().splitlines()
            part = Part(**done["part"])
            return part, PartResult([json.loads(line) for line in lines], done["facts"], done["reasons"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ExperimentError(f"{directory} cannot be read ({error}); remove it, and run again") from None

    def write_records(self, results: Iterable[tuple[Part, PartResult]]) -> None:
        """requests.jsonl of the whole run, in the order of its parts."""
        lines = [json.dumps(row) + "\n" for _, result in results for row in result.records]
        write_whole(self.path / "requests.jsonl", "".join(lines))


def take_over(
    experiment: Experiment, about: dict[str, Any], directory: RunDirectory, parts: Sequence[Part], source: Path
) -> None:
    """Copy what `source` has done of the parts that are not done here: records, links, the labs' verification.

    `about` is run.json, which is written. Raises ExperimentError for a run of other parameters.
    """
    other = RunDirectory(source)
    theirs = other.run()
    if not experiment.shares(theirs["experiment"], theirs["parameters"], about["parameters"]):
        kind = theirs["experiment"]
        raise ExperimentError(f"{source} holds a run of {kind} with other parameters; nothing of it fits here")
    found = {}
    for part in parts:
        if not directory.is_done(part.name) and other.is_done(part.name):
            done, result = other.load(part.name)
            if _same(done, part):
                found[part.name] = (done, result)
    if not found:
        return
    for lab in theirs["labs"]:
        names = [name for name in lab["parts"] if name in found]
        if names:
            changes = {name: told for name, told in (lab.get("changes") or {}).items() if name in found}
            about["labs"].append({**lab, "parts": names, "changes": changes})
    about["taken_from"] = [*about.get("taken_from", []), str(source)]
    directory.write_run(about)
    _copy_links(other.links, directory.links, set(found))
    for part, result in found.values():
        directory.keep(part, result)


def _same(one: Part, other: Part) -> bool:
    """Both ask for the same; what they were expected to take is no matter."""
    return (one.seed, one.variant, one.detail) == (other.seed, other.variant, json.loads(json.dumps(other.detail)))


def _copy_links(source: Path, target: Path, parts: set[str]) -> None:
    if not source.exists():
        return
    with source.open() as rows, target.open("a") as out:
        out.writelines(row for row in rows if json.loads(row)["part"] in parts)
