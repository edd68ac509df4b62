"""Pydantic's errors as sentences for the author of a topology file: where, what, and what to write instead.

Owns the wording and the did-you-mean; finds no errors of its own.
"""

import difflib
import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from testbed.model.units import quote
from testbed.topology.document import Document
from testbed.topology.problems import Path, Problem
from testbed.topology.salvage import hints, section_at, sections_of
from testbed.topology.schema import Section, TopologyFile

# What other tools call it.
SYNONYMS = {
    "bandwidth": "rate",
    "bw": "rate",
    "latency": "delay",
    "lat": "delay",
    "limit": "queue",
    "buffer": "queue",
    "links": "wan",
    "link": "wan",
    "wans": "wan",
    "nodes": "hosts",
    "workers": "hosts",
    "sites": "datacenters",
    "dc": "datacenters",
    "cidr": "subnet",
    "network": "subnet",
    "ip": "address",
    "env": "environment",
    "cmd": "command",
    "ports": "publish",
    "endpoints": "between",
    "cc": "congestion",
    "weight": "cost",
    "metric": "cost",
}

MOST_EXPLAINED = 500  # nobody reads on; each costs up to a millisecond


def explain(error: ValidationError, document: Document) -> list[Problem]:
    """One problem for each of pydantic's errors, of the first `MOST_EXPLAINED`."""
    details = error.errors(include_url=False)[:MOST_EXPLAINED]
    return [_explain(detail, document) for detail in details if not _follows(detail, details)]


def _follows(detail: ErrorDetails, details: list[ErrorDetails]) -> bool:
    """A list whose entries are all wrong is "too short" as well, for pydantic."""
    place = detail["loc"]
    return detail["type"] == "too_short" and any(
        len(other["loc"]) > len(place) and other["loc"][: len(place)] == place for other in details
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean x?` for the nearest known word, else nothing."""
    known = list(known)
    folded = {entry.lower().replace("_", "-"): entry for entry in known}
    near = difflib.get_close_matches(word.lower().replace("_", "-"), folded, n=1, cutoff=0.6)
    return f'; did you mean "{folded[near[0]]}"?' if near else ""


def _explain(detail: ErrorDetails, document: Document) -> Problem:
    path, at_key = _path(detail, document.data)
    return document.problem(path, _sentence(detail, path), at_key=at_key)


def _path(detail: ErrorDetails, data: Any) -> tuple[Path, bool]:
    """Place in the file: pydantic's location without the names of union members; and whether the key is meant.

    A location ends with "[key]" where a mapping's key is wrong, and where somebody's key is "[key]".
    """
    path: list[str | int] = []
    unknown = detail["type"] == "extra_forbidden"
    for number, step in enumerate(detail["loc"], 1):
        last = number == len(detail["loc"])
        inside = _descend(data, step)
        if inside:
            data = inside[0]
            path.append(step)
        elif last and step == "[key]" and not unknown:
            return tuple(path), True
        elif last and detail["type"] == "missing":
            path.append(step)
    return tuple(path), unknown


def _descend(data: Any, step: str | int) -> list[Any]:
    """Value at `step`, in a list of one; an empty list where there is no such step."""
    if isinstance(data, list):
        return data[step : step + 1] if isinstance(step, int) else []
    return [data[step]] if isinstance(data, dict) and step in data else []


def _sentence(detail: ErrorDetails, path: Path) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return _not_one_of(value, re.findall(r"'([^']*)'", context["expected"]))
    if kind == "missing":
        return f"is missing{_wanted(path)}"
    if kind == "extra_forbidden":
        return _unknown_key(path)
    if kind == "dict_type":
        return f"is {_kind(value)}, not a mapping; write a line `name: ...` for each of them"
    if kind == "model_type":
        return f"is {_kind(value)}, not a mapping{_keys(path)}"
    if kind in ("tuple_type", "list_type"):
        return f"is {_kind(value)}, not a list; write [...] or lines that begin with -"
    if kind == "too_short" and context["actual_length"] == 0:
        return f"is empty{_wanted(path)}"
    if kind in ("too_short", "too_long"):
        bound = context.get("min_length", context.get("max_length"))
        count = context["actual_length"]
        return f"has {count} {'entry' if count == 1 else 'entries'}, not {bound}{_wanted(path)}"
    return f"{quote(value)}: {detail['msg']}"


def _not_one_of(value: Any, known: list[str]) -> str:
    if not isinstance(value, str):
        return f"is {_kind(value)}; write one of {', '.join(known)}"
    return f"{quote(value)} is not one of {', '.join(known)}{did_you_mean(value, known)}"


def _unknown_key(path: Path) -> str:
    key = str(path[-1])
    section = section_at(TopologyFile, path[:-1])
    known = list(hints(section)) if section is not None else []
    guess = SYNONYMS.get(key.lower())
    if guess in known:
        return f'{quote(key)} is not a key of pddbed; it says "{guess}"'
    near = did_you_mean(key, known)
    if near:
        return f"{quote(key)} is unknown here{near}"
    owners = [name for name, owner in _all_sections().items() if key in hints(owner)]
    if owners:
        return f"{quote(key)} does not belong here but in {' or '.join(owners)}"
    return f"{quote(key)} is unknown here; known are {', '.join(known)}" if known else f"{quote(key)} is unknown here"


def _all_sections() -> dict[str, type[Section]]:
    """Every section by a name for messages; nested ones as in `a host`."""
    found: dict[str, type[Section]] = {"the top level": TopologyFile}
    queue: list[type[Section]] = [TopologyFile]
    while queue:
        for name, hint in hints(queue.pop(0)).items():
            nested = sections_of(hint)
            if nested is not None and nested[1] not in found.values():
                found[f"{name}:" if nested[0] == "one" else f"an entry of {name}:"] = nested[1]
                queue.append(nested[1])
    return found


def _wanted(path: Path) -> str:
    """Description of the field at `path`, or of what it takes."""
    section = section_at(TopologyFile, path[:-1])
    name = str(path[-1]) if path else ""
    if section is None or name not in section.model_fields:
        return ""
    if section.model_fields[name].description is not None:
        return f" ({str(section.model_fields[name].description).rstrip('.')})"
    accepted = section.model_json_schema()["properties"][name].get("description")
    return f"; write {accepted}" if accepted else ""


def _keys(path: Path) -> str:
    section = section_at(TopologyFile, path)
    return f"; its keys are {', '.join(hints(section))}" if section is not None else ""


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return quote(value)
