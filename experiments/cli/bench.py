"""`pddbed bench`: a load on a lab's gateway, or on any OpenAI-compatible server, and the table of what came of it."""

import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.cli.trace import DISTRIBUTIONS, FORMATS
from testbed.cli import CommandError
from testbed.cli.options import json_option, lab_option, print_json, sentences

if TYPE_CHECKING:
    from experiments.bench.session import Asked, Done

SYNTHETIC = "synthetic"
SEVERAL = "--goodput"


class _BenchCommand(click.Command):
    """Takes `--goodput ttft:500 tpot:50` as vllm does: every word up to the next option is a value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        several = fresh = False
        for word in args:
            if word.startswith("-"):
                option, given, _ = word.partition("=")
                several, fresh = option == SEVERAL, not given
            elif several and not fresh:
                spread.append(SEVERAL)
            else:
                fresh = False
            spread.append(word)
        return super().parse_args(ctx, spread)


def _rate(_ctx: click.Context, _param: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise click.BadParameter(f"{text!r} is no rate; write requests a second, such as 2.5, or inf")
    return rate


def _limits(_ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]) -> dict[str, float]:
    from experiments.bench.goodput import parse

    try:
        return parse(texts)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _percentiles(_ctx: click.Context, _param: click.Parameter, text: str) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise click.BadParameter(f"{text!r}: write percentiles from 0 to 100 with commas between, such as 50,90,99")
    return sorted(set(values))


def _share(_ctx: click.Context, _param: click.Parameter, text: str | None) -> float | None:
    from testbed.units import UnitError, parse_percent

    try:
        return None if text is None else parse_percent(text)
    except UnitError as error:
        raise click.BadParameter(str(error)) from None


def _token_ids(_ctx: click.Context, _param: click.Parameter, text: str) -> range:
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        raise click.BadParameter(f"{text!r}: write the lowest and the highest id, such as 32-126")
    return range(int(low), int(high) + 1)


@click.command(cls=_BenchCommand)
@lab_option
@click.option("--api", metavar="URL", help="Any OpenAI-compatible server, instead of a lab.")
@click.option("--model", metavar="NAME", help="Of those that the server has. [default: its first]")
@click.option(
    "--trace", "source", metavar="FILE|synthetic", default=SYNTHETIC, show_default=True, help="What is asked, and when."
)
@click.option("--format", "form", type=click.Choice(FORMATS), help="What FILE is. [default: by its name]")
@click.option(
    "--block-tokens", type=click.IntRange(1, 1 << 20), metavar="N", help="Of a block. [default: FILE's, or 16]"
)
@click.option("--speedup", type=click.FloatRange(0, min_open=True), metavar="K", help="Trace: K times as fast.")
@click.option("--max-input", type=click.IntRange(1), metavar="N", help="Trace: only prompts of up to N tokens.")
@click.option("--divide", type=click.IntRange(2), metavar="K", help="Trace: prompts and blocks K times as short.")
@click.option(
    "--input-len", type=click.IntRange(1, 1 << 24), metavar="N", help="Synthetic: of a prompt. [default: 512]"
)
@click.option(
    "--output-len",
    type=click.IntRange(1, 1 << 20),
    metavar="N",
    help="Tokens of an answer. [default: the trace's; synthetic: 64]",
)
@click.option(
    "--distribution",
    type=click.Choice(DISTRIBUTIONS),
    help="Synthetic: of hit rates, as trace make. [default: all miss]",
)
@click.option("--sessions", type=click.IntRange(1), metavar="N", help="With --distribution. [default: 16]")
@click.option("--prefix-share", callback=_share, metavar="P%", help="Synthetic: the beginning that all prompts share.")
@click.option(
    "--rate",
    "--request-rate",
    "rate",
    callback=_rate,
    metavar="N",
    help="Requests a second, Poisson; or inf: at once. [default: the trace's times; synthetic: inf]",
)
@click.option(
    "--burstiness",
    type=click.FloatRange(0, min_open=True),
    metavar="X",
    help="With --rate: gamma shape of the gaps. [default: 1]",
)
@click.option(
    "--concurrency",
    "--max-concurrency",
    "concurrency",
    type=click.IntRange(1),
    metavar="N",
    help="At most N at once; alone: a closed loop.",
)
@click.option(
    "--num",
    "--num-prompts",
    "num",
    type=click.IntRange(1, 10_000_000),
    metavar="N",
    help="Requests. [default: all; synthetic: 100]",
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Of prompts and arrivals.")
@click.option(
    "--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="Answers have the length asked for."
)
@click.option(
    "--token-ids",
    callback=_token_ids,
    default="32-126",
    show_default=True,
    metavar="A-B",
    help="Prompts are made of these.",
)
@click.option(
    "--warm-up",
    type=click.IntRange(0, 1000),
    default=1,
    show_default=True,
    metavar="N",
    help="Short requests first, not measured.",
)
@click.option(
    SEVERAL,
    "limits",
    multiple=True,
    callback=_limits,
    metavar="METRIC:MS",
    help="Count what keeps ttft:, tpot:, e2el: below; several.",
)
@click.option(
    "--percentiles", callback=_percentiles, default="99", show_default=True, metavar="Q,Q", help="In the table."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep records, summary and report there.",
)
@click.option(
    "--verify/--no-verify", default=True, show_default=True, help="With --out, measure the lab's links after the run."
)
@json_option
@sentences
def bench(
    lab: str | None, api: str | None, source: str, as_json: bool, out: Path | None, verify: bool, **options: Any
) -> None:
    """Send requests to a lab's gateway and print what vllm bench serve prints, and where tokens and KV came from.

    \b
    pddbed bench --rate 2 --num 100
    pddbed bench --concurrency 8 --distribution skewed --input-len 1024
    pddbed bench --trace trace.jsonl.gz --divide 64 --goodput ttft:10000 tpot:50

    Ctrl-C keeps what is done. Status 1: nothing was answered, the server went away, or the run is not faithful.
    """
    from experiments.bench.client import ApiError
    from experiments.bench.load import LoadError
    from experiments.bench.session import Session
    from experiments.framework.errors import ExperimentError
    from experiments.traces import TraceError

    asked = _asked(source, **options)
    if api is not None and lab is not None:
        raise click.UsageError("--api names another server than a lab's; leave --lab or --api out")
    command = " ".join(["pddbed bench", *map(shlex.quote, sys.argv[2:])])
    try:
        session = Session.of_lab(lab, asked) if api is None else Session.of_server(api, asked)
        done = session.run(out, verify=verify, command=command, quiet=as_json)
    except (ApiError, ExperimentError, LoadError, TraceError) as error:
        raise CommandError(str(error)) from None
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(_show(done, asked, as_json))


ONLY_TRACE = ("form", "speedup", "max_input", "divide")
ONLY_SYNTHETIC = ("input_len", "distribution", "sessions", "prefix_share")


def _asked(source: str, **options: Any) -> "Asked":
    """Raises UsageError for options that contradict each other."""
    from experiments.bench.session import Asked

    synthetic = source == SYNTHETIC
    for name in ONLY_TRACE if synthetic else ONLY_SYNTHETIC:
        if options[name] is not None:
            kind = "a trace: name its file with --trace" if synthetic else "a synthetic load: leave it or --trace out"
            raise click.UsageError(f"{_option(name)} is for {kind}")
    for one, other, why in (
        ("distribution", "prefix_share", "both say what prompts share"),
        ("speedup", "rate", "--rate takes the place of the trace's times"),
    ):
        if options[one] is not None and options[other] is not None:
            raise click.UsageError(f"{_option(one)} and {_option(other)} exclude each other: {why}")
    if options["sessions"] is not None and options["distribution"] is None:
        raise click.UsageError("--sessions is for --distribution")
    if options["burstiness"] is not None and (options["rate"] is None or math.isinf(options["rate"])):
        raise click.UsageError("--burstiness shapes the gaps of --rate; give a rate")
    if options["distribution"] is not None:
        length, block = options["input_len"] or 512, options["block_tokens"] or 16
        if length % block:
            raise click.UsageError(f"with --distribution prompts are whole blocks; {length} is no multiple of {block}")
    options["percentiles"] = tuple(options["percentiles"])
    return Asked(source=None if synthetic else Path(source), **options)


def _option(name: str) -> str:
    return {"form": "--format"}.get(name, "--" + name.replace("_", "-"))


def _show(done: "Done", asked: "Asked", as_json: bool) -> int:
    """The table or the summary; the exit status."""
    if as_json:
        print_json({**done.summary, "faithful": not done.reasons, "reasons": done.reasons, "notes": done.notes})
    else:
        from experiments.bench.table import table

        click.echo(table(done.summary, asked.percentiles))
        for note in done.notes:
            click.echo(note)
        for reason in done.reasons:
            click.echo(click.style("not faithful", fg="red") + f": {reason}")
    if done.why == "interrupted":
        return 130
    if done.why == "gone":
        click.echo(f"pddbed: nothing answers at {done.url} any more; look at pddbed ps, and at pddbed logs", err=True)
    return 1 if done.reasons or not done.summary["completed"] else 0
