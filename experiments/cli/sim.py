"""`pddbed sim`: a deployment at full scale, simulated; what each policy's requests wait for."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from testbed.cli import CommandError
from testbed.cli.options import json_option, print_json, table_console

if TYPE_CHECKING:
    from experiments.sim.outcome import Run
    from experiments.traces import Trace

POLICIES = ("pdd", "cdc-pd", "idc-pd", "pdd-chunked", "cdc-pd-chunked", "pdd-end-on-rld", "prfaas")
DEFAULT_POLICIES = ("pdd", "cdc-pd", "idc-pd", "pdd-chunked", "cdc-pd-chunked")


@click.command()
@click.option(
    "--trace", "file", type=click.Path(path_type=Path), metavar="TRACE", help="Trace of requests. [default: generated]"
)
@click.option(
    "--policy", "policies", type=click.Choice(POLICIES), multiple=True, help="Policy to simulate; repeat for several."
)
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Value of the deployment; --set ? lists the keys."
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="N/S",
    help="Request rate to which the arrivals are stretched.",
)
@click.option(
    "--num", type=click.IntRange(1, 10_000_000), metavar="N", help="Number of requests. [default: 3000, or all]"
)
@click.option(
    "--warm-up", type=click.IntRange(0), default=0, metavar="N", help="Number of first requests that only fill caches."
)
@click.option(
    "--spread", "spread_s", type=click.FloatRange(min=0), metavar="S", help="Begin the sessions within S seconds."
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Seed of the generated requests."
)
@json_option
def sim(
    file: Path | None,
    policies: tuple[str, ...],
    settings: tuple[str, ...],
    rate: float | None,
    num: int | None,
    warm_up: int,
    spread_s: float | None,
    seed: int,
    as_json: bool,
) -> None:
    """Simulate a deployment at full scale: time to first token, hand-over, transfers, by policy.

    Without --trace the requests are generated, like a coding agent's sessions, and the deployment is the one fitted to
    the published figures. TRACE is any that `pddbed trace stats` reads; where its times count from each session's own
    beginning, --spread sets when sessions begin. Nothing is measured: queues and times come from arithmetic, routes
    and hand-over from the workers' own rules.
    """
    from dataclasses import asdict

    from experiments.sim.deployment import VARIANTS, BadDeployment, Deployment
    from experiments.sim.simulator import simulate
    from experiments.sim.workload import LEFT_OUT, left_out
    from experiments.ttft.fit import Fit

    fit = Fit.read()
    deployment: Deployment = fit.deployment()
    if "?" in settings:
        for key, value in asdict(deployment).items():
            click.echo(f"{key}={value}")
        return
    try:
        deployment = deployment.with_settings(settings)
    except BadDeployment as error:
        raise click.UsageError(str(error)) from None
    if file is None:
        trace, warm_up = fit.trace(seed, num or 3000, deployment.context_tokens, rate)
        beyond_num = 0
    else:
        trace, beyond_num = _read(file, num, warm_up, rate, spread_s, seed)
    otherwise = left_out(trace, warm_up, deployment.context_tokens) | ({"beyond_num": beyond_num} if beyond_num else {})
    runs = {name: simulate(trace, VARIANTS[name], deployment, warm_up) for name in policies or DEFAULT_POLICIES}
    if as_json:
        about = {"origin": trace.origin, "sha256": trace.sha256, "block_tokens": trace.block_tokens, "warm_up": warm_up}
        summaries = {name: run.summary() for name, run in runs.items()}
        about |= {"left_out": otherwise, "notes": list(trace.notes)}
        print_json({"trace": about, "deployment": asdict(deployment), "policies": summaries})
        return
    console = table_console()
    console.print(_table(runs))
    measured = len(trace.requests) - warm_up
    console.print(f"simulated: {measured} requests, {trace.origin}\n{LEGEND}", style="dim")
    for note in (*trace.notes, *(LEFT_OUT[name].format(count, measured) for name, count in otherwise.items())):
        console.print(note)


def _read(
    file: Path, num: int | None, warm_up: int, rate: float | None, spread_s: float | None, seed: int
) -> "tuple[Trace, int]":
    """The trace to simulate, and how many of its requests are behind `num`."""
    from experiments.sim.workload import BadWorkload, at_rate, first, spread
    from experiments.traces import TraceError, read_trace

    try:
        trace, beyond_num = read_trace(file), 0
        if spread_s is not None:
            trace = spread(trace, spread_s, seed)
        if num is not None:
            whole, trace = trace, first(trace, warm_up + num)
            beyond_num = len(whole.requests) - len(trace.requests)
        if len(trace.requests) <= warm_up:
            raise BadWorkload(f"{file} has {len(trace.requests)} requests, all of which --warm-up {warm_up} takes")
        return (trace if rate is None else at_rate(trace, rate)), beyond_num
    except (TraceError, BadWorkload) as error:
        raise CommandError(str(error)) from None


def _table(runs: "dict[str, Run]") -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    titles = ("POLICY", "TTFT s", "TPOT", "E2EL", "KV s", "QUEUE", "RLD", "SLA")
    for title in titles:
        table.add_column(title, justify="left" if title in ("POLICY", "SLA") else "right", no_wrap=True)
    for name, run in runs.items():
        found = run.summary()
        table.add_row(
            name,
            _spread(found, "ttft_ms", "median", "p90", "p99"),
            _number(found["median_tpot_ms"], 1),
            _number(found["median_e2el_ms"], 1000),
            _spread(found, "kv_xfer_ms", "median", "p99"),
            _number(found["p99_kv_queue_ms"], 1000),
            f"{found['rld_token_share']:.1%}",
            "met" if found["meets_sla"] else "missed",
        )
    return table


def _spread(found: dict[str, Any], name: str, *words: str) -> str:
    return "/".join(_number(found[f"{word}_{name}"], 1000) for word in words)


def _number(value: float | None, divisor: float) -> str:
    return "-" if value is None else f"{value / divisor:.1f}"


LEGEND = """TTFT p50/p90/p99, KV transfer p50/p99, queue for a connection p99 (s)
TPOT (ms), E2EL (s) p50; RLD: share of all tokens
SLA: TTFT P90 below 10 s, P99 below 15 s"""
