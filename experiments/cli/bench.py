"""`pddbed bench`: a load on a lab's gateway, or on any OpenAI-compatible server, and the table of what came of it."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.cli.bench_options import (
    SEVERAL,
    SYNTHETIC,
    BenchCommand,
    asked_of,
    count,
    limits,
    percentiles,
    rate,
    share,
    token_ids,
)
from experiments.cli.trace import DISTRIBUTIONS, FORMATS
from testbed.cli import CommandError
from testbed.cli.options import json_option, lab_errors, lab_option, print_json
from testbed.cli.output import echo, harmless

if TYPE_CHECKING:
    from experiments.bench.measurement import Done
    from experiments.bench.options import Asked


@click.command(cls=BenchCommand)
@lab_option
@click.option("--api", metavar="URL", help="Address of any OpenAI-compatible server, instead of a lab.")
@click.option("--model", metavar="NAME", help="Model to ask for. [default: the server's first]")
@click.option(
    "--trace",
    "source",
    metavar="FILE",
    default=SYNTHETIC,
    show_default=True,
    help="Requests and their times: Mooncake's .jsonl, Azure's .csv, or a directory of conversations.",
)
@click.option(
    "--format", "form", type=click.Choice(FORMATS), metavar="NAME", help="Format of FILE, where its name does not say."
)
@count("--block-tokens", 1 << 20, "Number of tokens of a block. [default: FILE's; 16]")
@click.option(
    "--speedup", type=click.FloatRange(0, min_open=True), metavar="K", help="Send the requests K times as fast."
)
@count("--max-input", 1 << 40, "Leave out prompts of more than N tokens.")
@click.option(
    "--only-fitting", is_flag=True, help="Leave out requests that exceed the model's context, and count them."
)
@click.option("--divide", type=click.IntRange(2), metavar="K", help="Make prompts and blocks K times as short.")
@count("--input-len", 1 << 24, "Number of tokens of a prompt. [default: 512]")
@count("--output-len", 1 << 20, "Number of tokens of an answer. [default: the trace's; 64]")
@click.option(
    "--distribution",
    type=click.Choice(DISTRIBUTIONS),
    metavar="NAME",
    help=f"Distribution of hit rates, as in trace make: {', '.join(DISTRIBUTIONS)}. [default: all miss]",
)
@count("--sessions", 1_000_000, "Number of conversations of --distribution. [default: 16]")
@click.option(
    "--prefix-share",
    callback=share,
    metavar="P%",
    help="Share of a prompt, at its beginning, that all prompts have in common.",
)
@click.option(
    "--rate",
    "--request-rate",
    "rate",
    callback=rate,
    metavar="N",
    help="Requests a second, at random times (Poisson); inf sends all at once. [default: the trace's times; inf]",
)
@click.option(
    "--burstiness",
    type=click.FloatRange(0, min_open=True),
    metavar="X",
    help="Gamma shape of --rate's gaps: burstier below 1, more even above. [default: 1]",
)
@count(
    "--concurrency",
    1 << 20,
    "Limit of requests in flight; with all due at once, this is a closed loop.",
    "--max-concurrency",
)
@click.option("--in-turn", is_flag=True, help="Send a conversation's next turn when its last answer is complete.")
@count("--num", 10_000_000, "Number of requests. [default: all; 100]", "--num-prompts")
@click.option("--seed", type=click.IntRange(0), metavar="N", default=1, help="Seed of prompts and times. [default: 1]")
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    help="Make answers as long as asked for, or let the model end them. [default: ignore]",
)
@click.option(
    "--token-ids",
    callback=token_ids,
    default="32-126",
    metavar="A-B",
    help="Token ids of which prompts are made. [default: 32-126]",
)
@click.option(
    "--warm-up",
    type=click.IntRange(0, 1000),
    default=1,
    metavar="N",
    help="Number of short requests that are sent first and not measured. [default: 1]",
)
@click.option(
    SEVERAL,
    "limits",
    multiple=True,
    callback=limits,
    metavar="WHAT:MS ...",
    help="Count the requests that keep all limits on ttft, tpot, e2el.",
)
@click.option(
    "--percentiles", callback=percentiles, default="99", metavar="Q,Q", help="Percentiles in the table. [default: 99]"
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Directory for records, summary and a report, as experiments write them.",
)
@click.option(
    "--verify/--no-verify", default=True, help="With --out, measure the lab's links before and after. [default: do]"
)
@json_option
@lab_errors
def bench(
    lab: str | None, api: str | None, source: str, as_json: bool, out: Path | None, verify: bool, **options: Any
) -> None:
    """Send requests to a lab's gateway; print the figures of vllm bench serve, and which workers made tokens and KV.

    \b
    pddbed bench --rate 2 --num 100
    pddbed bench --concurrency 8 --distribution skewed --input-len 1024
    pddbed bench --trace trace.jsonl.gz --divide 64 --goodput ttft:10000 tpot:50

    Ctrl-C keeps the answers so far. Exit status 1 when nothing was answered, the server went away, or the run is
    unfaithful.
    """
    from experiments.bench.client import ApiError
    from experiments.bench.load import LoadError
    from experiments.bench.measurement import Measurement
    from experiments.framework.base import ExperimentError
    from experiments.traces import TraceError

    asked = asked_of(source, **options)
    if api is not None and lab is not None:
        raise click.UsageError("--api names another server than a lab's; leave --lab or --api out")
    command = " ".join(["pddbed bench", *map(shlex.quote, sys.argv[2:])])
    try:
        measurement = Measurement.of_lab(lab, asked) if api is None else Measurement.of_server(api, asked)
        done = measurement.run(out, verify=verify, command=command, quiet=as_json)
    except (ApiError, ExperimentError, LoadError, TraceError) as error:
        raise CommandError(str(error)) from None
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(_show(done, asked, as_json))


def _show(done: "Done", asked: "Asked", as_json: bool) -> int:
    """The table or the summary; the exit status."""
    if as_json:
        print_json({**done.summary, "faithful": not done.reasons, "reasons": done.reasons, "notes": done.notes})
    else:
        from experiments.bench.table import table

        echo(table(done.summary, asked.percentiles))
        for note in done.notes:
            echo(note)
        for reason in done.reasons:
            click.echo(click.style("not faithful", fg="red") + harmless(f": {reason}"))
    if done.why == "interrupted":
        return 130
    if done.why == "gone":
        echo(f"pddbed: nothing answers at {done.url} any more; look at pddbed ps, and at pddbed logs", err=True)
    return 1 if done.reasons or not done.summary["completed"] else 0
