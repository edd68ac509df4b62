"""`pddbed report DIR`: a run directory's report, made anew from its records."""

import sys
from pathlib import Path

import click

from experiments.cli.experiment import show
from testbed.cli import CommandError
from testbed.cli.options import json_option


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@json_option
def report(directory: Path, as_json: bool) -> None:
    """Evaluate a run's records again: table, summary.json, report.html and timeline.json. Exit status as of the run."""
    from experiments.framework.errors import ExperimentError
    from experiments.framework.runner import report as make_report

    try:
        evaluation = make_report(directory)
    except ExperimentError as error:
        raise CommandError(str(error)) from None
    sys.exit(show(directory, evaluation, as_json))
