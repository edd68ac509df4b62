"""Options that several commands share, and how a command's failure becomes one sentence."""

import functools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from testbed.cli import CommandError
from testbed.lab.record import LabError

F = TypeVar("F", bound=Callable[..., Any])

lab_option = click.option("--lab", "-l", "lab", metavar="NAME", help="Which lab, where several are up.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def sentences(command: F) -> F:
    """Turn a LabError into pddbed's one-sentence error with exit status 1."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except LabError as error:
            raise CommandError(str(error)) from None

    return wrapped  # type: ignore[return-value]


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=str))
