"""Options that several commands share, topology files and labs that they name, and errors in one sentence."""

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from testbed.cli import CommandError
from testbed.cli.output import echo, json_text
from testbed.lab.record import LabError

if TYPE_CHECKING:
    from testbed.lab.record import Record
    from testbed.model.plan import LabPlan

F = TypeVar("F", bound=Callable[..., Any])

lab_option = click.option("--lab", "-l", "lab", metavar="NAME", help="Name of the lab; needed where several are up.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def lab_errors(command: F) -> F:
    """Decorate a command: a LabError becomes pddbed's error in one sentence, with exit status 1."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except LabError as error:
            raise CommandError(str(error)) from None

    return wrapped  # type: ignore[return-value]


def lab_or_only(name: str | None) -> "Record":
    """The named lab, or the only one: then standard error says which that is, and whose where it is somebody else's.

    For commands that change a lab, load it or write what they find there. Raises LabError.
    """
    from testbed.lab.origin import describe, foreign
    from testbed.lab.record import find_record

    record = find_record(name)
    if name is None:
        whose = foreign(record)
        echo(f"pddbed: {describe(record)}" + (f", raised by {whose}" if whose else ""), err=True)
    return record


def tell_losses(record: "Record", *, err: bool = False) -> None:
    """A line for each part of the lab that has ended while the lab is up."""
    for loss in record.losses():
        echo(f'lab "{record.name}": {loss}; see: pddbed status -l {record.name}', fg="red", err=err)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on stderr while something takes its time; nothing where that is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def table_console() -> Any:
    """The console that tables are printed on; rich is slow to import."""
    from testbed.cli.console import Console

    return Console()


def print_json(value: Any) -> None:
    click.echo(json_text(json.dumps(value, indent=2, default=str)))


def load_or_fail(file: Path, name: str | None = None) -> "LabPlan":
    """The plan of a topology file. Raises CommandError that lists all problems."""
    from testbed.topology import TopologyErrors, load_plan

    try:
        return load_plan(file, name)
    except TopologyErrors as errors:
        raise CommandError(str(errors)) from None
