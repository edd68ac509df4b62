"""`pddbed status`: one lab in detail: hosts and their processes, links asked for and applied."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from testbed.cli.options import json_option, lab_errors, lab_option, print_json, table_console
from testbed.cli.output import echo

if TYPE_CHECKING:
    from testbed.lab.messages import HostStatus, LabStatus


@click.command()
@lab_option
@json_option
@lab_errors
def status(lab: str | None, as_json: bool) -> None:
    """Show a lab's hosts, processes and WAN links."""
    from testbed.lab.control import ask_lab
    from testbed.lab.messages import Status
    from testbed.lab.record import find_record

    reply = ask_lab(find_record(lab), Status())
    if as_json:
        print_json(reply)
        return
    _print(reply)


def _print(status: "LabStatus") -> None:
    from rich.markup import escape

    from testbed.cli.ps import duration
    from testbed.cli.wan import print_links
    from testbed.lab.troubles import trouble_words

    console = table_console()
    api = f", API {status['api']}" if status["api"] else ""
    console.print(
        f"[bold]{status['name']}[/] up for {duration(status['uptime_s'])}{api}, from {escape(str(status['file']))}"
    )
    console.print(_host_table(status["hosts"]))
    ended = list(_losses(status["hosts"]))
    for sentence in [*ended, *_other_losses(status["lost"], ended)]:
        echo(sentence, fg="red")
    print_links(status["links"])
    for reason in status["unfaithful"]:
        echo(f"not to be trusted: {reason}", fg="red")
    for row in status.get("troubles", ()):
        console.print(f"[{'red' if row['claim'] else 'yellow'}]{escape(trouble_words(row))}[/]")


def _losses(hosts: "list[HostStatus]") -> Iterator[str]:
    """A sentence for each process that has ended."""
    from testbed.lab.processes import describe_exit

    for host in hosts:
        again = f" and started anew ({host['restarts']} x)" if host.get("restarts") else ""
        if host["exit_status"] is not None and (host["role"] or host["exit_status"]):
            yield f"{host['name']} {describe_exit(host['exit_status'])}{again}; see: pddbed logs {host['name']}"


def _other_losses(lost: dict[str, str], told: list[str]) -> Iterator[str]:
    """A sentence for each part of the network that is gone."""
    for name, how in sorted(lost.items()):
        if not any(sentence.startswith(f"{name} {how}") for sentence in told):
            yield f"{name} {how}"


def _host_table(hosts: "list[HostStatus]") -> Any:
    from rich.markup import escape
    from rich.table import Table

    from testbed.verify.pace import pace_words

    table = Table(box=None, pad_edge=False)
    for title in ("HOST", "DATACENTER", "ADDRESS", "RUNS", "STATE"):
        table.add_column(title, overflow="fold")
    for host in hosts:
        colour = {"ready": "green", "running": "green", "starting": "yellow", "exited": "red"}.get(host["state"], "dim")
        state = host["state"] if host["exit_status"] is None else f"{host['state']} ({host['exit_status']})"
        runs = host["role"] or host["command"] or "-"
        if host["pace"]:
            runs += f" ({pace_words(host['pace'])})"
        elif host.get("profile", "native") != "native":
            runs += f" (paced as {host['profile']})"
        table.add_row(host["name"], host["datacenter"], host["address"], escape(runs), f"[{colour}]{state}[/]")
    return table
