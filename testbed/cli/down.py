"""`pddbed down`: end labs and leave nothing of them."""

import sys
from typing import TYPE_CHECKING

import click

from testbed.cli.options import lab_errors, lab_option, working
from testbed.cli.output import echo

if TYPE_CHECKING:
    from testbed.lab.record import Record


@click.command()
@click.argument("lab_argument", metavar="[LAB]", required=False)
@lab_option
@click.option("--all", "all_labs", is_flag=True, help="End every lab of this user.")
@lab_errors
def down(lab_argument: str | None, lab: str | None, all_labs: bool) -> None:
    """End a lab and everything in it. Succeeds when it is already gone.

    Without a name, the only lab that is up is ended. When another user or another checkout raised that lab, the
    command asks first; without a terminal, the name must be given.
    """
    from testbed.lab.origin import describe
    from testbed.lab.record import find_record, live_records, state_root, sweep_dead
    from testbed.supervisor.start import down as end_lab

    if len([given for given in (lab_argument, lab, all_labs) if given]) > 1:
        raise click.UsageError("name one lab, or say --all")
    name = lab_argument or lab
    swept = sweep_dead()
    records = live_records()
    if all_labs:
        chosen = [record for record in records if record.directory.parent == state_root()]
    elif name is not None:
        chosen = [record for record in records if record.name == name][:1]  # this user's own comes before root's
    elif records:
        chosen = [find_record(None)]
        _ask_where_foreign(chosen[0])
    else:
        chosen = []
    for record in chosen:
        shown = describe(record) if all_labs or name is None else f'lab "{record.name}"'
        with working(f'ending lab "{record.name}"'):
            end_lab(record)
        echo(f"{shown} is down")
    for name_swept in swept:
        echo(f'lab "{name_swept}" had died; its record is swept')
    if not chosen and not swept:
        echo(f'lab "{name}" is not up' if name else "no lab is up")


def _ask_where_foreign(record: "Record") -> None:
    """Nobody named the lab. Raises LabError unless it is this user's from here, or the terminal says yes."""
    from testbed.lab.origin import describe, foreign
    from testbed.lab.record import LabError

    whose = foreign(record)
    if whose is None:
        return
    said = f"{describe(record)} was raised by {whose}"
    if sys.stdin.isatty() and sys.stderr.isatty():
        if click.confirm(f"{said}; end it?", err=True):
            return
        raise LabError(f'lab "{record.name}" stays up')
    raise LabError(f"{said}; name it to end it: pddbed down {record.name}")
