"""`pddbed trace stats|make|convert`: request traces, checked before anything uses them."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from testbed.cli import CommandError
from testbed.cli.options import json_option, print_json, table_console
from testbed.cli.output import echo

if TYPE_CHECKING:
    from experiments.traces import Trace

FORMATS = ("auto", "mooncake", "agentic", "azure")
DISTRIBUTIONS = ("skewed", "uniform", "mean-matched", "bimodal", "ninety")
form_option = click.option(
    "--format", "form", type=click.Choice(FORMATS), default="auto", show_default=True, help="Format of TRACE."
)
block_option = click.option(
    "--block-tokens",
    type=click.IntRange(1, 1 << 20),
    metavar="N",
    help="Number of tokens of a block, where the file has none.",
)
file_argument = click.argument("file", metavar="TRACE", type=click.Path(path_type=Path))


@click.group()
def trace() -> None:
    """Examine, generate and convert request traces.

    TRACE is Mooncake-style .jsonl or .jsonl.gz, a directory of agentic conversations (.json), or Azure's .csv.
    """


@trace.command("stats")
@file_argument
@form_option
@block_option
@click.option(
    "--cache-tokens",
    type=click.IntRange(min=0),
    metavar="N",
    help="Size of the LRU cache in tokens. [default: unbounded]",
)
@json_option
def stats_command(file: Path, form: str, block_tokens: int | None, cache_tokens: int | None, as_json: bool) -> None:
    """Print a trace's sizes, and the hit rates that a prefix cache would have."""
    from experiments.traces.stats import stats

    found = stats(_read(file, form, block_tokens), cache_tokens)
    if as_json:
        print_json(asdict(found))
        return
    console = table_console()
    console.print(_table(asdict(found), cache_tokens))


@trace.command()
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--distribution",
    type=click.Choice(DISTRIBUTIONS),
    default="skewed",
    show_default=True,
    help="Distribution of hit rates.",
)
@click.option(
    "--num", "requests", type=click.IntRange(1, 10_000_000), default=512, show_default=True, help="Number of requests."
)
@click.option(
    "--sessions", type=click.IntRange(1, 1_000_000), default=16, show_default=True, help="Number of sessions."
)
@click.option(
    "--prompt-tokens", type=click.IntRange(1, 1 << 24), default=4096, show_default=True, help="Length of a prompt."
)
@click.option(
    "--output-tokens", type=click.IntRange(1, 1 << 20), default=64, show_default=True, help="Mean length of an answer."
)
@click.option(
    "--block-tokens", type=click.IntRange(1, 1 << 20), default=16, show_default=True, help="Length of a block."
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    default=6.9,
    show_default=True,
    metavar="N/S",
    help="Requests a second.",
)
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Seed of the trace.")
@click.option("--force", "-f", is_flag=True, help="Overwrite FILE.")
def make(file: Path, distribution: str, rate: float, force: bool, **options: Any) -> None:
    """Generate a trace with a distribution of hit rates. A seed gives the same trace on every machine.

    skewed: 75 % of requests above 95 % hit. uniform: evenly from 0 to 100 %. mean-matched: uniform, with the mean of
    skewed. bimodal: three in five hit nearly all, the rest little. ninety: skewed, 90 % hit in the
    mean. The first prompt of each session misses and comes on top.
    """
    from experiments.traces import TraceError
    from experiments.traces.generate import Recipe, generate
    from experiments.traces.mooncake import write_trace

    _refuse_existing(file, force)
    if options["prompt_tokens"] < options["block_tokens"]:
        raise CommandError(
            f"a prompt of {options['prompt_tokens']} tokens has no full block of {options['block_tokens']}; "
            "lengthen --prompt-tokens or shorten --block-tokens"
        )
    made = generate(Recipe(distribution=distribution, rate_per_s=rate, **options))
    if rest := options["prompt_tokens"] % options["block_tokens"]:
        echo(f"prompts are whole blocks: {options['prompt_tokens'] - rest} tokens each", err=True)
    try:
        write_trace(made, file)
    except TraceError as error:
        raise CommandError(str(error)) from None
    echo(f"{len(made.requests)} requests in {file} ({made.sha256[:12]})")


@trace.command()
@file_argument
@click.argument("out", metavar="OUT", type=click.Path(dir_okay=False, path_type=Path))
@form_option
@block_option
@click.option("--force", "-f", is_flag=True, help="Overwrite OUT.")
def convert(file: Path, out: Path, form: str, block_tokens: int | None, force: bool) -> None:
    """Rewrite a trace of any format as Mooncake-style JSONL (gzipped where OUT ends in .gz)."""
    from experiments.traces import TraceError
    from experiments.traces.mooncake import write_trace

    found = _read(file, form, block_tokens)
    _refuse_existing(out, force)
    try:
        write_trace(found, out)
    except TraceError as error:
        raise CommandError(str(error)) from None
    echo(f"{len(found.requests)} requests in {out} ({found.sha256[:12]})")
    for note in found.notes:
        echo(note, err=True)


def _read(file: Path, form: str, block_tokens: int | None) -> "Trace":
    from experiments.traces import TraceError, read_trace

    try:
        return read_trace(file, form, block_tokens)
    except TraceError as error:
        raise CommandError(str(error)) from None


def _refuse_existing(file: Path, force: bool) -> None:
    if file.exists() and not force:
        raise CommandError(f"{file} exists; choose another name, or -f to overwrite it")


def _table(found: dict[str, Any], cache_tokens: int | None) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    cache = "unbounded cache" if cache_tokens is None else f"LRU cache of {cache_tokens} tokens"
    sessions = f", {found['sessions']} sessions" if found["sessions"] else ""
    table.add_row("requests", f"{found['requests']}{sessions}, {found['seconds']:.0f} s")
    for key, name in (("input_tokens", "prompt"), ("output_tokens", "output"), ("delta_tokens", "delta")):
        spread = "  ".join(f"{which} {value:.0f}" for which, value in found[key].items())
        table.add_row(f"{name} tokens", spread)
    rates = f"mean {found['mean_hit']:.1%}, median {found['median_hit']:.1%}, by tokens {found['weighted_hit']:.1%}"
    table.add_row("hit rate", f"{rates} ({cache})")
    table.add_row("above 95 % hit", f"{found['share_above_95']:.1%} of requests")
    table.add_row("block", f"{found['block_tokens']} tokens")
    table.add_row("sha256", found["sha256"])
    if found["without_answer"]:
        table.add_row("no answer", f"{found['without_answer']} requests have an output of 0 tokens")
    for note in found["notes"]:
        table.add_row("", note)
    return table
