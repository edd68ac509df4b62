"""`pddbed verify`: every WAN link of a running lab measured against its file, and every fabric measured."""

import sys
from typing import TYPE_CHECKING

import click

from testbed.cli.options import json_option, lab_errors, lab_option, lab_or_only, print_json, table_console

if TYPE_CHECKING:
    from testbed.lab.messages import Figure, LinkFigures, VerificationResult

# Warming TCP over the longest round trip, 20,000 loss probes and the trains, for several links.
PATIENCE_S = 900.0


@click.command()
@lab_option
@click.option(
    "--quick", is_flag=True, help="Judge delay and rate only, with few probes of the rest, as at the end of `up`."
)
@json_option
@lab_errors
def verify(lab: str | None, quick: bool, as_json: bool) -> None:
    """Measure every WAN link, in both directions, against its requested values, and each datacenter's fabric.

    Exit status 1 when a link is outside of its tolerance, or when the measurement is not to be trusted.
    """
    from testbed.lab.control import ask_lab
    from testbed.lab.messages import Verify

    record = lab_or_only(lab)
    if as_json:
        result = ask_lab(record, Verify(quick), PATIENCE_S)
        print_json(result)
    else:
        from rich.console import Console

        with Console(stderr=True).status("measuring every link"):
            result = ask_lab(record, Verify(quick), PATIENCE_S)
        _print(result)
    sys.exit(0 if result["ok"] and result["faithful"] else 1)


def _print(result: "VerificationResult") -> None:
    from rich.markup import escape
    from rich.table import Table

    from testbed.verify.words import shown

    table = Table(box=None, pad_edge=False)
    for title in ("LINK", "DIRECTION", "FIGURE", "ASKED", "MEASURED", "VERDICT", "NOTE"):
        table.add_column(title, overflow="fold")
    measured: list[tuple[str, str, list[Figure]]] = [
        (_link_name(link), way, figures) for link in result["links"] for way, figures in link["directions"].items()
    ]
    measured += [
        (f"fabric of {fabric['datacenter']}", " to ".join(fabric["between"]), fabric["figures"])
        for fabric in result["fabrics"]
    ]
    # A lab has many hosts: of paths that are as they ought to be their number is enough.
    measured += [("path", path["name"], path["figures"]) for path in result["paths"] if not path["ok"]]
    for name, way, figures in measured:
        for figure in figures:
            colour = {"ok": "green", "FAILED": "red", "reported": "dim"}.get(figure["verdict"], "yellow")
            table.add_row(
                name,
                way,
                figure["figure"],
                shown(figure["asked"], figure["unit"]),
                shown(figure["measured"], figure["unit"]),
                f"[{colour}]{figure['verdict']}[/]",
                figure["note"],
            )
    console = table_console()
    console.print(table)
    if result["paths"]:
        good = sum(path["ok"] for path in result["paths"])
        console.print(f"paths of the other hosts: {good} of {len(result['paths'])} are as asked")
    for reason in result["reasons"]:
        console.print(f"[red]unfaithful[/]: {escape(reason)}")
    for missing in result["not_measured"]:
        console.print(f"[yellow]not measured[/]: {missing}")
    if result["ok"] and result["faithful"]:
        if not result["not_measured"]:
            console.print("every link does what it is asked to do")
        else:
            console.print("what was measured is what the links are asked to do")
    if result["quick"]:
        console.print("the quick form judges delay and rate; pddbed verify without --quick the rest")


def _link_name(link: "LinkFigures") -> str:
    a, b = link["between"]
    return f"{link['name']} ({a} - {b})" if a else str(link["name"])
