"""The way from a file to a plan, and every mistake in it at once: read, parse, validate, check, resolve."""

import os
import re
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from testbed.model.plan import LabPlan
from testbed.topology.checks import run_checks
from testbed.topology.checks.memory import machine_memory_bytes
from testbed.topology.document import Document, parse_yaml
from testbed.topology.explain import explain
from testbed.topology.files import read_text
from testbed.topology.names import MAX_NAME, InvalidName, check_name
from testbed.topology.problems import Problem, TopologyErrors
from testbed.topology.resolve import resolve
from testbed.topology.salvage import salvage
from testbed.topology.scaling import scaled
from testbed.topology.schema import TopologyFile
from testbed.topology.timeline.compile import compile_timeline
from testbed.topology.timeline.link_values import links_of_file

# What is between them grows with the square: routes, overlaps of subnets, links on the same path.
MOST_ENTRIES = {"datacenters": 200, "wan": 1000, "profiles": 200, "congestion": 3000}


def load_plan(path: str | Path, name: str | None = None, *, memory_bytes: int | None = None) -> LabPlan:
    """The plan of a topology file; `name` renames the lab. Raises TopologyErrors with every mistake.

    `memory_bytes` is the memory that links are checked against; by default this machine's.
    """
    return plan_from_text(read_text(path), path, name, memory_bytes=memory_bytes)


def plan_from_text(text: str, path: str | Path, name: str | None = None, *, memory_bytes: int | None = None) -> LabPlan:
    """As `load_plan`, of text that was read already; `path` is for messages and relative paths."""
    file = os.fspath(path)
    document = parse_yaml(text, file)
    if not isinstance(document.data, dict):
        what = "is empty" if document.data is None else "holds no mapping at its top"
        message = f"{what}; a topology has at least datacenters: (pddbed schema lists all keys)"
        raise TopologyErrors([*document.problems, document.problem((), message)])
    for key, most in MOST_ENTRIES.items():
        entries = document.data.get(key)
        if isinstance(entries, dict | list) and len(entries) > most:
            message = f"has {len(entries):,} entries, more than the {most:,} that are read; no lab is that large"
            raise TopologyErrors([*document.problems, document.problem((key,), message, at_key=True)])
    asked, problems = _validate(document)
    memory = machine_memory_bytes() if memory_bytes is None else memory_bytes
    topology, unscalable = scaled(asked)
    findings = [*unscalable, *run_checks(topology, memory)]
    problems += [document.problem(found.path, found.message, at_key=found.at_key) for found in findings]
    if name is not None:
        problems += _check_lab_name(name, file)
    timeline, mistakes = compile_timeline(
        topology.congestion,
        links_of_file(topology),
        folder=Path(file).absolute().parent,
        seed=topology.seed,
        source=file,
        place=document.problem,
        memory_bytes=memory,
    )
    problems += mistakes
    if problems or document.problems:
        raise TopologyErrors([*document.problems, *problems])
    lab = name or topology.name or lab_name(file)
    return replace(resolve(topology, lab, Path(file).absolute()), congestion=timeline)


def lab_name(file: str) -> str:
    """A name for a lab from its file's: `my topology.yaml` is `my-topology`."""
    words = re.findall(r"[A-Za-z0-9_][A-Za-z0-9._-]*", Path(file).stem, re.ASCII)
    return "-".join(words)[:MAX_NAME] or "lab"


def _validate(document: Document) -> tuple[TopologyFile, list[Problem]]:
    """The file as models, as far as it can be read, and what pydantic finds wrong with it."""
    try:
        return TopologyFile.model_validate(document.data), []
    except ValidationError as error:
        return salvage(TopologyFile, document.data), explain(error, document)


def _check_lab_name(name: str, file: str) -> list[Problem]:
    try:
        check_name(name)
    except InvalidName as error:
        return [Problem(file, None, None, "", f"the lab's name {error}")]
    return []
