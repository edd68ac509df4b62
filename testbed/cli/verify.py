"""`pddbed verify`: measure every WAN link of a running lab against its file, and what the fabrics give."""

import sys
from typing import Any

import click

from testbed.cli.options import json_option, lab_option, lab_or_only, print_json, sentences

# Warming TCP over the longest round trip, 20,000 loss probes and the trains, for several links.
PATIENCE_S = 900.0


@click.command()
@lab_option
@click.option("--quick", is_flag=True, help="Delay and rate only, as at the end of `up`.")
@json_option
@sentences
def verify(lab: str | None, quick: bool, as_json: bool) -> None:
    """Measure delay, jitter, rate, loss and queue of every link, both ways, and what each fabric gives. Status 1
    outside tolerance."""
    from testbed.lab.control import ask_lab

    record = lab_or_only(lab)
    if as_json:
        result, _ = ask_lab(record, {"op": "verify", "quick": quick}, PATIENCE_S)
        print_json(result)
    else:
        from rich.console import Console

        with Console(stderr=True).status("measuring every link"):
            result, _ = ask_lab(record, {"op": "verify", "quick": quick}, PATIENCE_S)
        _print(result)
    sys.exit(0 if result["ok"] and result["faithful"] else 1)


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from testbed.verify.words import shown

    table = Table(box=None, pad_edge=False)
    for title in ("LINK", "DIRECTION", "FIGURE", "ASKED", "MEASURED", "VERDICT", "NOTE"):
        table.add_column(title, overflow="fold")
    measured = [(link["name"], way, figures) for link in result["links"] for way, figures in link["directions"].items()]
    measured += [
        (f"fabric of {fabric['datacenter']}", " to ".join(fabric["between"]), fabric["figures"])
        for fabric in result["fabrics"]
    ]
    for name, way, figures in measured:
        for figure in figures:
            verdict = "[green]ok[/]" if figure["ok"] else "[red]FAILED[/]"
            table.add_row(
                name,
                way,
                figure["figure"],
                shown(figure["asked"], figure["unit"]),
                shown(figure["measured"], figure["unit"]),
                verdict if figure["judged"] else "[dim]reported[/]",
                figure["note"],
            )
    console = Console(highlight=False)
    console.print(table)
    for reason in result["reasons"]:
        console.print(f"[red]unfaithful[/]: {reason}")
    if result["ok"] and result["faithful"]:
        console.print("every link does what it is asked to do")
