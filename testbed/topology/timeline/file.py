"""A timeline from a file of its own, as `pddbed wan play` takes it: the list alone, or under a key `congestion:`.

Owns that form of file; the entries are read as those of a topology file are.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path as FilePath

from pydantic import ValidationError

from testbed.model.timeline import Timeline
from testbed.model.units import quote
from testbed.topology.document import Document, parse_yaml
from testbed.topology.explain import explain
from testbed.topology.problems import Path, Problem, TopologyErrors
from testbed.topology.salvage import salvage
from testbed.topology.schema import TimelineFile
from testbed.topology.timeline.compile import compile_timeline
from testbed.topology.timeline.link_values import LinkFacts

_KEY = "congestion"


def timeline_from_text(
    text: str, file: str, folder: FilePath, links: Sequence[LinkFacts], *, seed: int, memory_bytes: int
) -> Timeline:
    """The timeline in a text; `file` is for messages, traces are relative to `folder`. Raises TopologyErrors."""
    document = parse_yaml(text, file)
    listed = isinstance(document.data, list)
    if listed:
        _put_below_key(document)
    if not isinstance(document.data, dict) or not document.data.get(_KEY):
        message = "holds no timeline; write a list of entries such as - outage: {at: 5s, duration: 1s}"
        raise TopologyErrors([*document.problems, document.problem((), message)])
    problems = list(document.problems)
    for key in [key for key in document.data if key != _KEY]:
        hint = "; a topology's own timeline begins by itself when it is up" if key == "datacenters" else ""
        problems.append(document.problem((key,), f"{quote(key)} is no part of a timeline{hint}", at_key=True))
    data = {_KEY: document.data[_KEY]}
    try:
        entries = TimelineFile.model_validate(data)
    except ValidationError as error:
        entries = salvage(TimelineFile, data)
        problems += explain(error, document)
    timeline, mistakes = compile_timeline(
        entries.congestion,
        links,
        folder=folder,
        seed=seed,
        source=file,
        place=document.problem,
        memory_bytes=memory_bytes,
    )
    problems += mistakes
    if problems or timeline is None:
        raise TopologyErrors(_without_key(problem) if listed else problem for problem in problems)
    return timeline


def _put_below_key(document: Document) -> None:
    """A bare list is read as if `congestion:` stood above it, so that its paths are those of a topology file."""

    def below(path: Path) -> Path:
        return (_KEY, *path)

    document.data = {_KEY: document.data}
    document.keys = {below(path): mark for path, mark in document.keys.items()}
    document.values = {below(path): mark for path, mark in document.values.items()}


def _without_key(problem: Problem) -> Problem:
    message = problem.message.replace(f"with {_KEY}[", "with [")
    return replace(problem, path=problem.path.removeprefix(_KEY), message=message)
