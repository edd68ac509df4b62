"""A bench run's directory, in the format of every experiment (experiments.framework.directory), so that `pddbed report`
reads it. Owns what is written; the lab is asked by the caller.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.bench.experiment import PART, Bench
from experiments.framework import machine
from experiments.framework.directory import RunDirectory
from experiments.framework.errors import ExperimentError
from experiments.framework.experiment import Evaluation, Part, PartResult
from experiments.framework.runner import report


def refuse_used(path: Path) -> None:
    """Raises ExperimentError when the directory cannot take a new run: before anything is sent."""
    if RunDirectory(path).run_file.exists():
        raise ExperimentError(f"{path} holds a run already; choose another --out, or remove it")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExperimentError(f"cannot keep a run in {path}: {error.strerror}") from None


def keep(
    path: Path,
    words: str,
    command: str,
    parameters: Mapping[str, Any],
    result: PartResult,
    labs: list[dict[str, Any]],
    topology: str,
    started: float,
) -> Evaluation:
    """Write everything, report included. Raises ExperimentError."""
    directory = RunDirectory(path)
    directory.keep(Part(PART, parameters["seed"], result.facts["duration_s"], {"row": PART}), result)
    directory.write_run(
        {
            "experiment": Bench.name,
            "title": f"bench: {words}",
            "claim": "Measured at the client, as vllm bench serve does; there is no published figure to meet.",
            "command": command,
            "quick": False,
            "seeds": 1,
            "parameters": dict(parameters),
            "parts": [PART],
            "topology": topology,
            "versions": machine.versions(),
            "machine": machine.machine(),
            "started": started,
            "finished": time.time(),
            "labs": labs,
        }
    )
    return report(path)


def reasons(path: Path) -> list[str]:
    """Why the run in a directory is not faithful, as its report has it."""
    found: list[str] = RunDirectory(path).run()["reasons"]
    return found
