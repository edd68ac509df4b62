"""Docstrings, help texts and schema descriptions begin with a noun phrase or a verb, so that each is clear by itself.

An editor or a terminal shows such a text alone: "What the lab knows" has no subject there, "Facts of a lab" has.
"""

import ast
import re
from collections.abc import Iterator

import click
import pytest

from testbed.cli import main
from testbed.topology.schema import json_schema
from tests.conftest import ROOT

NO_SUBJECT = re.compile(r"(What|How|Whom?|Whose|Which|Of|Why|Where|Whence|When|Whether|That)\b")
STILL_THERE = {"testbed": 0, "workers": 25, "experiments": 0, "benchmarks": 0, "tests": 76, "schema": 0}
"""Number of texts that are still to be mended. Lower it with each that is; it never grows."""


def docstrings(folder: str) -> Iterator[tuple[str, str]]:
    """Place and text of every docstring, those of attributes included."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            for child in ast.iter_child_nodes(node):
                if (
                    isinstance(child, ast.Expr)
                    and isinstance(child.value, ast.Constant)
                    and isinstance(child.value.value, str)
                ):
                    yield f"{file.relative_to(ROOT)}:{child.lineno}", child.value.value.strip()


def help_texts(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    """Place and text of a command's help, its options' and its subcommands'."""
    yield name, command.help or ""
    for parameter in command.params:
        yield f"{name} {parameter.opts[0]}", getattr(parameter, "help", None) or ""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            yield from help_texts(found, f"{name} {child}")


def descriptions(schema: object, place: str = "#") -> Iterator[tuple[str, str]]:
    """Place and text of every description in a JSON Schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("description"), str):
            yield place, schema["description"]
        for key, value in schema.items():
            yield from descriptions(value, f"{place}/{key}")
    elif isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from descriptions(value, f"{place}/{index}")


def without_subject(texts: Iterator[tuple[str, str]]) -> list[str]:
    return [f"{place}: {text.splitlines()[0]}" for place, text in texts if NO_SUBJECT.match(text)]


@pytest.mark.parametrize("folder", [name for name in STILL_THERE if name != "schema"])
def test_docstrings_have_a_subject(folder: str) -> None:
    found = without_subject(docstrings(folder))
    assert len(found) <= STILL_THERE[folder], "\n".join([f"{len(found)} instead of {STILL_THERE[folder]}:", *found])


def test_help_texts_have_a_subject() -> None:
    assert without_subject(help_texts(main, "pddbed")) == []


def test_schema_descriptions_have_a_subject() -> None:
    found = without_subject(descriptions(json_schema()))
    assert len(found) <= STILL_THERE["schema"], "\n".join(found)
