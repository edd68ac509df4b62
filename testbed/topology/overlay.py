"""Overlays: values that make a variant of a topology, by the paths where they stand.

`{"serving.handoff": "one-shot", "wan.wan0.rate": "10mbit"}` is laid over the loaded document. A path's steps are keys,
and names of a list's entries; all but the last must be there, so that a path that leads nowhere is an error. Values
are checked when the variant is loaded, like those of any other file.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from testbed.topology.document import Document, parse_yaml
from testbed.topology.files import read_text
from testbed.topology.problems import Path as KeyPath
from testbed.topology.problems import Problem, TopologyErrors

Value = str | int | float | bool | None | Sequence[Any] | Mapping[str, Any]
Overlay = Mapping[str, Value]


def laid_over(file: str | os.PathLike[str], overlay: Overlay, text: str | None = None) -> str:
    """The topology with the overlay's values, without its comments. `text`: of the file, left out: what it holds now.

    Raises TopologyErrors.
    """
    document = parse_yaml(read_text(Path(file)) if text is None else text, os.fspath(file))
    paths, problems = _paths(document, overlay)
    _refuse(document, problems)
    for path, name in paths.items():
        holder = document.data
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] = _as_text(overlay[name])
    return yaml.safe_dump(document.data, sort_keys=False, allow_unicode=True)


def edited(file: Path, overlay: Mapping[str, str]) -> str:
    """The file's text with other scalars where there are some; all else stays, comments too. Raises TopologyErrors."""
    text = read_text(file)
    document = parse_yaml(text, str(file))
    paths, problems = _paths(document, overlay)
    missing = [path for path in paths if path not in document.values]
    _refuse(document, [*problems, *(document.problem(path, "there is no value to be replaced") for path in missing)])
    lines = text.splitlines(keepends=True)
    places = sorted(((document.values[path], overlay[name]) for path, name in paths.items()), key=_place, reverse=True)
    for mark, value in places:
        line = lines[mark.line]
        lines[mark.line] = f"{line[: mark.column]}{value}{line[mark.column + mark.width :]}"
    return "".join(lines)


def _place(one: tuple[Any, str]) -> tuple[int, int]:
    return one[0].line, one[0].column


def _refuse(document: Document, problems: Sequence[Problem]) -> None:
    if problems or document.problems:
        raise TopologyErrors([*document.problems, *problems])


def _paths(document: Document, overlay: Mapping[str, Any]) -> tuple[dict[KeyPath, str], list[Problem]]:
    """The overlay's names by their paths in the document, and what is wrong with those that lead nowhere."""
    paths: dict[KeyPath, str] = {}
    problems = []
    for name in overlay:
        path: KeyPath = ()
        at, steps = document.data, name.split(".")
        for step in steps:
            entries = _entries(at)
            if step not in entries and (len(path) < len(steps) - 1 or not isinstance(at, dict)):
                message = f"an overlay sets {name}; there is no {step} here, but {', '.join(entries) or 'nothing'}"
                problems.append(document.problem((*path, step), message))
                break
            key = entries.get(step, step)
            path = (*path, key)
            at = at[key] if step in entries else None
        else:
            paths[path] = name
    return paths, problems


def _entries(at: Any) -> dict[str, str | int]:
    """Names of what is in a mapping, or in a list of things with names, and the keys that lead there."""
    if isinstance(at, list):
        return {str(one["name"]): i for i, one in enumerate(at) if isinstance(one, dict) and "name" in one}
    return {key: key for key in at} if isinstance(at, dict) else {}


def _as_text(value: Any) -> Any:
    """As a document has it: every scalar the text that one would type."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {key: _as_text(one) for key, one in value.items()}
    if isinstance(value, Sequence):
        return [_as_text(one) for one in value]
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
