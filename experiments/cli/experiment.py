"""`pddbed experiment list|run|fit`: the published figures, reproduced; `pddbed report`: a run's report made anew."""

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from testbed.cli import CommandError
from testbed.cli.options import json_option, print_json, table_console
from testbed.cli.output import echo

if TYPE_CHECKING:
    from experiments.framework.base import Evaluation


def _known(_ctx: click.Context, _param: click.Parameter, name: str) -> str:
    from experiments.framework.registry import EXPERIMENTS

    if name not in EXPERIMENTS:
        raise click.BadParameter(f"no experiment is called {name!r}; there are: {', '.join(EXPERIMENTS)}")
    return name


@click.group()
def experiment() -> None:
    """Reproduce the published figures. Each experiment tests one claim on real transfers and reports what it finds."""


@experiment.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the experiments with the claim that each tests."""
    from experiments.framework.registry import EXPERIMENTS

    if as_json:
        print_json([{"name": name, "claim": claim} for name, (_, claim) in EXPERIMENTS.items()])
        return
    for name, (_, claim) in EXPERIMENTS.items():
        echo(f"{name:<12} {claim}")


@experiment.command()
@click.argument("name", callback=_known)
@click.option("--quick", is_flag=True, help="Run a short form, under a minute, with one seed and few requests.")
@click.option("--seeds", type=click.IntRange(1, 100), metavar="N", help="Number of seeds. [default: 3; 1 with --quick]")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Directory for results; a run that was interrupted there goes on. [default: runs/NAME-TIME]",
)
@click.option(
    "--from",
    "source",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Run of the same parameters whose finished parts are taken over (split's and consistency's from ttft's).",
)
@click.option(
    "--wan-driver",
    type=click.Choice(["auto", "netem", "userspace"]),
    default="auto",
    show_default=True,
    help="Emulator of the WAN links.",
)
@json_option
def run(
    name: str, quick: bool, seeds: int | None, out: Path | None, source: Path | None, wan_driver: str, as_json: bool
) -> None:
    """Run an experiment in a lab of its own and report. Exit status 1 when a figure is missed or the run unfaithful."""
    from experiments.framework.base import ExperimentError, Options
    from experiments.framework.registry import find
    from experiments.framework.runner import run as run_experiment

    out = out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    options = Options(quick, seeds or (1 if quick else 3))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # keep what is done, and say how to go on
    try:
        evaluation = run_experiment(find(name), options, out, wan_driver, source=source, quiet=as_json)
    except ExperimentError as error:
        raise CommandError(str(error)) from None
    except KeyboardInterrupt:
        if (out / "run.json").exists():
            echo(f"pddbed: interrupted; go on with: {_again(name, quick, seeds, out)}", err=True)
        sys.exit(130)
    sys.exit(show(out, evaluation, as_json))


@experiment.command()
@click.argument("name", type=click.Choice(["skew", "handoff", "ttft"]))
def fit(name: str) -> None:
    """Fit an experiment's free parameters anew and write its fit.json.

    The parameters of skew come from transfers in a lab, those of handoff from arithmetic, those of ttft from the
    simulator.
    """
    from experiments.framework.base import ExperimentError
    from experiments.framework.registry import refit

    try:
        for line in refit(name)(lambda text: echo(f"{text} ...", err=True)):
            echo(line)
    except ExperimentError as error:
        raise CommandError(str(error)) from None


def _again(name: str, quick: bool, seeds: int | None, out: Path) -> str:
    options = ("--quick " if quick else "") + (f"--seeds {seeds} " if seeds else "")
    return f"pddbed experiment run {name} {options}--out {out}"


def show(out: Path, evaluation: "Evaluation", as_json: bool) -> int:
    """The table; the exit status."""
    from experiments.framework.directory import RunDirectory

    summary = RunDirectory(out).summary()
    if as_json:
        print_json(summary)
    else:
        console = table_console()
        console.print(_table(evaluation))
        for reason in summary["reasons"]:
            console.print(f"[red]unfaithful[/]: {reason.replace('[', chr(92) + '[')}")
        for note in evaluation.notes:
            console.print(note, markup=False)
        console.print(f"{out}/report.html", style="dim")
    missed = any(figure.verdict == "missed" for figure in evaluation.figures)
    return 1 if missed or not summary["faithful"] else 0


def _table(evaluation: "Evaluation") -> Any:
    from rich.table import Table

    from experiments.report.page import shown

    table = Table(box=None, pad_edge=False)
    for title in ("FIGURE", "TARGET", "MEASURED", "95 % INTERVAL", "VERDICT", "LABEL"):
        table.add_column(title, justify="right" if title in ("TARGET", "MEASURED") else "left")
    for figure in evaluation.figures:
        target = shown(figure.target, figure.unit)
        if figure.target is None and figure.low is not None and figure.high is not None:
            target = f"{shown(figure.low, figure.unit)} to {shown(figure.high, figure.unit)}"
        interval = figure.interval
        colour = {"met": "[green]met[/]", "missed": "[red]MISSED[/]"}.get(figure.verdict, "[dim]reported[/]")
        table.add_row(
            figure.text,
            target,
            shown(figure.value, figure.unit),
            "-" if interval is None else " to ".join(shown(end, figure.unit) for end in interval),
            colour,
            figure.label,
        )
    return table


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@json_option
def report(directory: Path, as_json: bool) -> None:
    """Evaluate a run's records again: table, summary.json, report.html and timeline.json. Exit status as of the run."""
    from experiments.framework.base import ExperimentError
    from experiments.framework.runner import report as make_report

    try:
        evaluation = make_report(directory)
    except ExperimentError as error:
        raise CommandError(str(error)) from None
    sys.exit(show(directory, evaluation, as_json))
