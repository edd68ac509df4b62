"""Parts that another run has done already, taken over instead of run again: `pddbed experiment run NAME --from DIR`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.framework.directory import RunDirectory
from experiments.framework.errors import ExperimentError
from experiments.framework.experiment import Experiment, Part


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
