"""`pddbed ps`: the labs that are up."""

import time
from typing import Any

import click

from testbed.cli.options import json_option, lab_errors, print_json, table_console, tell_losses
from testbed.cli.output import echo

PATIENCE_S = 3.0  # for a lab's answer: a table of labs must not wait for one that is busy


@click.command()
@json_option
@lab_errors
def ps(as_json: bool) -> None:
    """List the labs that are up."""
    from testbed.lab.record import live_records, sweep_dead

    sweep_dead()
    records = live_records()
    labs = [{**record.state(), "name": record.name, "unfaithful": _reasons(record)} for record in records]
    if as_json:
        print_json(labs)
        return
    if not labs:
        echo("no lab is up; start one with: pddbed up FILE")
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("LAB", "HOSTS", "WAN DRIVER", "MODEL", "API", "UP FOR", "FAITHFUL", "FILE"):
        table.add_column(title, overflow="fold")
    for lab in labs:
        started = lab.get("started")
        cells = (
            lab["name"],
            lab.get("hosts", ""),
            lab.get("driver", "starting"),
            (lab.get("model") or "-") if lab.get("workers") else "-",
            lab.get("api") or "-",
            duration(time.time() - started) if isinstance(started, float) else "-",
            "-" if lab["unfaithful"] is None else "NO" if lab["unfaithful"] else "yes",
            lab.get("file") or "-",
        )
        table.add_row(*(escape(str(cell)) for cell in cells))
    table_console().print(table)
    for record in records:
        tell_losses(record)
    for lab in labs:
        for reason in lab["unfaithful"] or ():
            echo(f"{lab['name']}: not to be trusted: {reason}", fg="red")


def _reasons(record: Any) -> list[str] | None:
    """Reasons not to trust what is measured in a lab; None where it does not answer: it starts, say."""
    from testbed.lab.control import ask_lab
    from testbed.lab.messages import Faithful
    from testbed.lab.record import LabError

    try:
        return ask_lab(record, Faithful(), PATIENCE_S).reasons
    except LabError:
        return None


def duration(seconds: float) -> str:
    """12 s, 3 min, 2 h 5 min."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
