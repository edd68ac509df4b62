"""The options of `pddbed bench`: their groups in the help, what a value may be, and which contradict each other."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from experiments.bench.options import Asked

SYNTHETIC = "synthetic"
SEVERAL = "--goodput"
GROUPS = {
    "Server": ("lab", "api", "model"),
    "A trace": ("source", "form", "speedup", "max_input", "only_fitting", "divide"),
    "Or a synthetic load": ("input_len", "prefix_share", "distribution", "sessions"),
    "Both": ("num", "output_len", "block_tokens", "seed", "token_ids", "ignore_eos", "warm_up"),
    "Pace": ("rate", "burstiness", "concurrency", "in_turn"),
    "Result": ("limits", "percentiles", "out", "verify", "as_json"),
}


class BenchCommand(click.Command):
    """Groups its options, and takes `--goodput ttft:500 tpot:50` as vllm does: words up to the next option."""

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

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = ((param.name, param.get_help_record(ctx)) for param in self.get_params(ctx))
        records = {name: record for name, record in shown if record is not None}
        groups = {title: [records.pop(name) for name in names] for title, names in GROUPS.items()}
        for title, rows in {**groups, "Help": list(records.values())}.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def rate(_ctx: click.Context, _param: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise click.BadParameter(f"{text!r} is no rate; write requests a second, such as 2.5, or inf")
    return rate


def limits(_ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]) -> dict[str, float]:
    from experiments.bench.metrics import parse

    try:
        return parse(texts)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def percentiles(_ctx: click.Context, _param: click.Parameter, text: str) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise click.BadParameter(f"{text!r}: write percentiles from 0 to 100 with commas between, such as 50,90,99")
    return sorted(set(values))


def share(_ctx: click.Context, _param: click.Parameter, text: str | None) -> float | None:
    from testbed.model.units import UnitError, parse_percent

    try:
        return None if text is None else parse_percent(text)
    except UnitError as error:
        raise click.BadParameter(str(error)) from None


def token_ids(_ctx: click.Context, _param: click.Parameter, text: str) -> range:
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        raise click.BadParameter(f"{text!r}: write the lowest and the highest id, such as 32-126")
    return range(int(low), int(high) + 1)


def count(name: str, most: int, words: str, *others: str) -> Callable[[Any], Any]:
    """An option that counts, from 1 on; its range is told when it is left."""
    return click.option(
        name, *others, name[2:].replace("-", "_"), type=click.IntRange(1, most), metavar="N", help=words
    )


ONLY_TRACE = ("form", "speedup", "max_input", "only_fitting", "divide")
ONLY_SYNTHETIC = ("input_len", "distribution", "sessions", "prefix_share")


def asked_of(source: str, **options: Any) -> "Asked":
    """Raises UsageError for options that contradict each other."""
    from experiments.bench.options import Asked

    synthetic = source == SYNTHETIC
    for name in ONLY_TRACE if synthetic else ONLY_SYNTHETIC:
        if options[name] not in (None, False):
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
