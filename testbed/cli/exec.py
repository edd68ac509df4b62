"""`pddbed exec` and `pddbed shell`: commands inside a host of the lab. Their status is the command's own."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from testbed.cli.options import lab_errors, lab_option, lab_or_only

if TYPE_CHECKING:
    from testbed.lab.record import Record


@click.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@lab_option
@click.argument("host")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@lab_errors
def exec_(lab: str | None, host: str, command: tuple[str, ...]) -> None:
    """Run COMMAND on HOST (or on router.DATACENTER, or a WAN link's own node)."""
    from testbed.lab.enter import run_inside

    arguments = list(command[1:] if command[0] == "--" else command)
    if not arguments:
        raise click.UsageError("name a command after --")
    sys.exit(run_inside(_record(lab), host, arguments))


@click.command()
@lab_option
@click.argument("host")
@lab_errors
def shell(lab: str | None, host: str) -> None:
    """Open an interactive shell on HOST."""
    from testbed.lab.enter import run_inside

    record = _record(lab)
    prompt = {"PS1": rf"\[\e[1;36m\]{record.name}/{host}\[\e[0m\]:\w# "}
    command = ["bash", "--norc", "-i"] if Path("/bin/bash").exists() else ["/bin/sh", "-i"]
    sys.exit(run_inside(record, host, command, prompt))


def _record(lab: str | None) -> "Record":
    """The named lab, or the only one; a command in somebody else's lab says first whose that is."""
    from testbed.lab.origin import foreign
    from testbed.lab.record import find_record

    record = find_record(lab)
    return lab_or_only(lab) if lab is None and foreign(record) else record
