"""`pddbed doctor`: the abilities of this machine, and the next step where it lacks one."""

from typing import TYPE_CHECKING

import click

from testbed.cli.options import json_option, print_json
from testbed.cli.output import echo, harmless

if TYPE_CHECKING:
    from testbed.doctor.examination import Examination

_COLOURS = {"ok": "green", "limited": "yellow", "missing": "red"}


@click.command()
@json_option
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Examine this machine: whether it can raise labs, which WAN driver it will use, and what is missing.

    Exit status 0 when a lab can be raised, 1 otherwise. The command changes nothing.
    """
    from testbed.doctor.examination import examine

    examination = examine()
    if as_json:
        print_json(examination.as_dict())
    else:
        _print(examination)
    if not examination.can_raise_lab:
        context.exit(1)


def _print(examination: "Examination") -> None:
    width = max(len(finding.name) for finding in examination.findings)
    for finding in examination.findings:
        state = click.style(f"{finding.state:<8}", fg=_COLOURS[finding.state])
        click.echo(f"{state} " + harmless(f"{finding.name:<{width}}  {finding.detail}"))
        if finding.next_step:
            echo(f"{'':<8} {'':<{width}}  -> {finding.next_step}")
    click.echo()
    if examination.driver is not None:
        click.echo(f"WAN driver: auto means {examination.driver}, because {examination.driver_reason}.")
    else:
        click.echo(f"WAN driver: none works here: {examination.driver_reason}.")
    if examination.can_raise_lab:
        click.echo("This machine can raise labs: pddbed up topologies/two-dc.yaml")
    else:
        broken = [finding.name for finding in examination.findings if finding.state == "missing"]
        click.echo(f"This machine cannot raise labs yet; see: {', '.join(broken)}.")
