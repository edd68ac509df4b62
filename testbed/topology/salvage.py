"""Salvage of a file that does not validate, so that the checks between values run all the same.

Owns the walk through nested sections and the marker for unreadable values. Without it, one mistyped delay would
hide an unknown datacenter until the next attempt.
"""

from collections.abc import Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from testbed.topology.problems import Path
from testbed.topology.schema import Section

Shape = Literal["one", "by name", "list"]


class Unreadable:
    """Stands where a value could not be read. What depends on it is not checked."""

    def __repr__(self) -> str:
        return "UNREADABLE"

    def __bool__(self) -> bool:
        return False


UNREADABLE: Any = Unreadable()


def readable(*values: Any) -> bool:
    """True when all values could be read; of a section, everything in it."""
    return all(
        value is not UNREADABLE and (not isinstance(value, Section) or readable(*value.__dict__.values()))
        for value in values
    )


@cache
def hints(section: type[Section]) -> dict[str, Any]:
    """The complete annotation of every field."""
    return {
        name: hint
        for name, hint in get_type_hints(section, include_extras=True).items()
        if name in section.model_fields
    }


def sections_of(hint: Any) -> tuple[Shape, type[Section]] | None:
    """Nesting of a section in an annotation: one, a mapping of them by name, a list of them; None for a value."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return sections_of(arguments[0])
    if origin in (Union, UnionType):
        others = [argument for argument in arguments if argument is not NoneType]
        return sections_of(others[0]) if len(others) == 1 else None
    shape: Shape = "by name" if origin is dict else "list"
    if origin in (dict, tuple, list):
        inner = sections_of(arguments[1] if origin is dict else arguments[0])
        return (shape, inner[1]) if inner is not None and inner[0] == "one" else None
    return ("one", hint) if isinstance(hint, type) and issubclass(hint, Section) else None


def section_at(root: type[Section], path: Path) -> type[Section] | None:
    """The section whose keys stand at `path` of a file; None where there is a value."""
    section: type[Section] | None = root
    steps: Iterator[str | int] = iter(path)
    for step in steps:
        nested = _nested(hints(section).get(str(step))) if section is not None else None
        if nested is None:
            return None
        if nested[0] != "one" and next(steps, None) is None:
            return None
        section = nested[1]
    return section


def _nested(hint: Any) -> tuple[Shape, type[Section]] | None:
    """As `sections_of`; of a choice between a value and a section, the section."""
    return sections_of(hint) or next(filter(None, map(_nested, get_args(hint))), None)


def salvage(section: type[Section], raw: Any) -> Any:
    """The section with every field that can be read, and UNREADABLE for the others.

    A section nested in it is always a section, if need be one with nothing readable in it; only a list or a
    mapping of sections may itself be UNREADABLE.
    """
    if raw is None:
        raw = {}
    values = {}
    for name, hint in hints(section).items():
        if not isinstance(raw, dict):
            nested = sections_of(hint)
            values[name] = salvage(nested[1], raw) if nested and nested[0] == "one" else UNREADABLE
        elif name in raw:
            values[name] = _salvage_value(hint, raw[name])
        elif section.model_fields[name].is_required():
            values[name] = UNREADABLE
    given = {name for name in values if isinstance(raw, dict) and name in raw}
    return section.model_construct(given, **values)


def _salvage_value(hint: Any, raw: Any) -> Any:
    nested = sections_of(hint)
    if nested is None:
        try:
            return _reader(hint).validate_python(raw)
        except ValidationError:
            return UNREADABLE
    shape, section = nested
    if shape == "one":
        optional = get_origin(hint) in (Union, UnionType)
        return None if raw is None and optional else salvage(section, raw)
    if raw is None:
        raw = {} if shape == "by name" else []
    if shape == "by name":
        return {key: salvage(section, item) for key, item in raw.items()} if isinstance(raw, dict) else UNREADABLE
    return tuple(salvage(section, item) for item in raw) if isinstance(raw, list) else UNREADABLE


@cache
def _reader(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)
