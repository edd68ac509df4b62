"""`pddbed compare DIR DIR ...`: runs of one experiment, or of bench, side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from testbed.cli import CommandError
from testbed.cli.options import json_option, print_json, table_console

if TYPE_CHECKING:
    from experiments.report.compare import Compared

LEGEND = (
    'Changes are against the first run. "overlap": the 95 % intervals over seeds do, so that the change may be chance; '
    "without an interval nobody knows."
)


@click.command()
@click.argument(
    "directories", metavar="DIR DIR ...", nargs=-1, required=True, type=click.Path(file_okay=False, path_type=Path)
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a page, too, with the plots over each other.",
)
@json_option
def compare(directories: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Show the results of several runs of an experiment, or of bench, side by side, with their different parameters.

    \b
    pddbed bench --lab near --rate 2 --out runs/near
    pddbed bench --lab far --rate 2 --out runs/far
    pddbed compare runs/near runs/far --out near-far.html

    The command evaluates the records again and leaves the directories as they are.
    """
    from experiments.framework.base import ExperimentError
    from experiments.framework.directory import write_whole
    from experiments.report.page import comparison

    try:
        runs = _read(directories)
        if out is not None:
            write_whole(out, comparison(runs, LEGEND))
    except ExperimentError as error:
        raise CommandError(str(error)) from None
    if as_json:
        print_json(_json(runs))
        return
    _show(runs)
    if out is not None:
        click.echo(out)


def _read(directories: Sequence[Path]) -> "list[Compared]":
    """Raises ExperimentError."""
    from experiments.framework.base import ExperimentError
    from experiments.framework.directory import RunDirectory
    from experiments.framework.runner import evaluated
    from experiments.report.compare import Compared, common

    if len(directories) < 2:
        raise click.UsageError("one run alone compares with nothing; name two directories or more")
    if len({path.resolve() for path in directories}) < len(directories):
        raise click.UsageError("a directory is named twice")
    runs = []
    for path, name in zip(directories, _names(directories), strict=True):
        about, _, evaluation = evaluated(RunDirectory(path))
        runs.append(Compared(name, about, evaluation))
    kinds = list(dict.fromkeys(run.about["experiment"] for run in runs))
    if len(kinds) > 1 and not common(runs):
        raise ExperimentError(f"runs of {' and '.join(kinds)} have no figures in common; compare runs of one of them")
    return runs


def _names(directories: Sequence[Path]) -> list[str]:
    """The directories' own names, where these tell them apart."""
    short = [path.resolve().name for path in directories]
    return short if len(set(short)) == len(short) else [str(path) for path in directories]


def _show(runs: "Sequence[Compared]") -> None:
    from rich.table import Table
    from rich.text import Text

    from experiments.report.compare import differences
    from experiments.report.page import compared_rows

    console = table_console()
    table = Table(box=None, pad_edge=False)
    table.add_column("FIGURE")
    for number, run in enumerate(runs):
        table.add_column(Text(run.name), justify="right")
        if number:
            table.add_column("CHANGE")
    for row in compared_rows(runs):
        table.add_row(*map(Text, row))
    console.print(table)
    if told := differences(runs):
        asked = Table("ASKED DIFFERENTLY", box=None, pad_edge=False)
        for run in runs:
            asked.add_column(Text(run.name))
        for name, values in told:
            asked.add_row(*map(Text, (name, *values)))
        console.print(asked)
    if len({str(run.about["topology"]) for run in runs}) > 1:
        console.print("Their topology files differ; --out FILE shows how.")
    for run in runs:
        for reason in run.about["reasons"]:
            console.print(Text.assemble((f"{run.name} is unfaithful", "red"), f": {reason}"))
        for note in run.evaluation.notes:
            console.print(Text(f"{run.name}: {note}"))
    console.print(LEGEND, style="dim")


def _json(runs: "Sequence[Compared]") -> dict[str, Any]:
    from experiments.report.compare import change, differences, keys

    figures = {}
    for key in keys(runs):
        found = [run.figure(key) for run in runs]
        first = found[0]
        changes = [None if first is None or one is None else change(first, one) for one in found[1:]]
        figures[key] = {
            "values": [None if one is None else one.value for one in found],
            "intervals_95": [None if one is None else one.interval for one in found],
            "changes": [None if one is None else one.relative for one in changes],
            "apart": [None if one is None else one.apart for one in changes],
        }
    return {
        "experiment": runs[0].about["experiment"],
        "runs": [run.name for run in runs],
        "faithful": [run.about["faithful"] for run in runs],
        "notes": [list(run.evaluation.notes) for run in runs],
        "differences": dict(differences(runs)),
        "figures": figures,
    }
