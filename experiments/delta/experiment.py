"""`pddbed experiment run delta`: WAN bytes a request with and without what the decode side's cache saves."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from experiments.delta.runs import SCALE, excerpt, open_session, parts, recipe, trace_file
from experiments.framework.base import Evaluation, Experiment, Options, Part, PartResult, Session
from experiments.framework.checks import bytes_figure
from experiments.framework.figures import Figure
from experiments.framework.lab import ExperimentLab
from experiments.report.charts import Chart, Series, cdf
from experiments.traces import read_trace
from experiments.traces.stats import stats
from experiments.traces.trace import Trace

TOPOLOGY = Path(__file__).resolve().parents[2] / "topologies" / "delta.yaml"
Results = Mapping[str, tuple[Part, PartResult]]
Pairs = list[tuple[PartResult, PartResult]]


@cache
def real_trace() -> Trace | None:
    file = trace_file()
    return None if file is None else excerpt(read_trace(file))


class Delta(Experiment):
    name = "delta"
    title = "delta: WAN bytes with a decode-side radix cache"
    claim = "At a token-weighted hit rate of 90 % a radix cache on the decode side cuts the WAN's bandwidth tenfold."
    with_workers = True

    def topology(self, options: Options) -> Path:
        return TOPOLOGY

    def parameters(self, options: Options) -> dict[str, Any]:
        trace = None if options.quick else real_trace()
        return {
            "scale": SCALE,
            "recipe": asdict(recipe(options, 1)),
            "trace": None if trace is None else {"origin": trace.origin, **asdict(stats(trace))},
            "seeds": options.seeds,
            "quick": options.quick,
        }

    def parts(self, options: Options) -> list[Part]:
        return parts(options, None if options.quick else real_trace())

    def session(self, lab: ExperimentLab, options: Options) -> AbstractContextManager[Session]:
        return open_session(lab, None if options.quick else real_trace())

    def evaluate(self, parameters: Mapping[str, Any], results: Results) -> Evaluation:
        pairs, traced = _pairs(results, "full", "delta"), _pairs(results, "trace, full", "trace, delta")
        hits = [_weighted_hit(delta) for _, delta in pairs]
        figures = [
            Figure(
                "weighted_hit", "hit rate by tokens (MD's cache)", "share", tuple(hits), "configured", 0.9, 0.89, 0.91
            ),
            *_sizes(pairs, "", None),
            _ratio(pairs, "", 10.0, 9.0, "as 1 / (1 - hit rate), less what is not KV: token ids, notices, control"),
        ]
        if traced:
            text = "hit rate by tokens, real agentic trace"
            hits = [_weighted_hit(delta) for _, delta in traced]
            expected = parameters["trace"]["weighted_hit"]
            note = "target: what an unbounded cache of the trace's own blocks has; sessions begin cold"
            low, high = expected - 0.01, expected + 0.01
            figures += [
                Figure("trace_weighted_hit", text, "share", tuple(hits), "predicted", expected, low, high, note=note),
                *_sizes(traced, "trace_", "real agentic trace"),
                _ratio(traced, "trace_", None, None, "real agentic trace, whatever it gives"),
            ]
        figures.append(bytes_figure(results))
        return Evaluation(figures, _charts(results), _notes(parameters), _summary(results))


def _pairs(results: Results, full: str, delta: str) -> Pairs:
    """The two rows of each seed, where both are done."""
    by_row = {(part.detail["row"], part.seed): result for part, result in results.values()}
    seeds = sorted({seed for row, seed in by_row if row == full})
    return [(by_row[full, seed], by_row[delta, seed]) for seed in seeds if (delta, seed) in by_row]


def _weighted_hit(result: PartResult) -> float:
    """Hit rate of MD's cache, each request weighing as many tokens as its prompt has."""
    tokens = sum(record["input_len"] for record in result.records)
    return sum(record["pdd_md_hit"] * record["input_len"] for record in result.records) / tokens


def bytes_per_request(result: PartResult) -> float:
    """TCP payload in both directions of the WAN, each byte once, from the capture."""
    return float(sum(result.facts["captured_bytes"].values())) / len(result.records)


def _kv_per_request(result: PartResult) -> float:
    return sum(result.facts["bytes_by_class"].get("kv", {}).values()) / len(result.records)


def _sizes(pairs: Pairs, prefix: str, what: str | None) -> list[Figure]:
    words = f", {what}" if what else ""
    return [
        Figure(
            f"{prefix}bytes_{name}",
            f"WAN bytes a request, {text}{words}",
            "kB",
            tuple(bytes_per_request(pair[side]) / 1000 for pair in pairs),
            "check",
            note="TCP payload both ways, each byte once, from the capture",
        )
        for side, (name, text) in enumerate((("full", "nothing shared"), ("delta", "delta only")))
    ]


def _ratio(pairs: Pairs, prefix: str, target: float | None, low: float | None, note: str) -> Figure:
    values = tuple(bytes_per_request(full) / bytes_per_request(delta) for full, delta in pairs)
    kv = [_kv_per_request(full) / _kv_per_request(delta) for full, delta in pairs]
    if kv:
        note += f"; KV alone {sum(kv) / len(kv):.2f} x"
    high = None if low is None else float("inf")
    label = "configured" if target else "predicted"
    text = "full over delta, real agentic trace" if prefix else "full over delta"
    return Figure(f"{prefix}ratio", text, "x", values, label, target, low, high, note=note)  # type: ignore[arg-type]


def _summary(results: Results) -> dict[str, Any]:
    return {f"wan_bytes_per_request_{name}": bytes_per_request(result) for name, (_, result) in results.items()} | {
        f"wan_bytes_by_class_{name}": result.facts["bytes_by_class"] for name, (_, result) in results.items()
    }


def _charts(results: Results) -> list[Chart]:
    rows: dict[str, list[float]] = {}
    for part, result in results.values():
        deltas = [(record["pdd_delta_bytes"] or 0) / 1000 for record in result.records]
        rows.setdefault(part.detail["row"], []).extend(deltas)
    sizes = Chart(
        "KV that crosses the WAN for a request",
        "kB of KV",
        "% of requests",
        [cdf(row, values) for row, values in rows.items()],
        caption="Most requests need a small part of their prompt's KV; the few long misses make most of the bytes.",
    )
    series: list[Series] = []
    for name, (_, result) in results.items():
        total, points = 0.0, [(0.0, 0.0)]
        for index, record in enumerate(result.records, 1):
            total += (record["pdd_delta_bytes"] or 0) / 1e6
            points.append((float(index), total))
        if name.endswith("seed1") or name.startswith("trace"):
            series.append(Series(name, points))
    return [sizes, Chart("KV over the WAN, request after request", "requests", "MB of KV, in all", series)]


def _notes(parameters: Mapping[str, Any]) -> list[str]:
    notes = [
        "Real workers: prefill, relay and main decode with the built-in model, through the gateway. Bytes are TCP "
        "payload in packets captured where they leave their border router; what crosses again is counted once.",
        f"One token stands for {parameters['scale']}: prompts and blocks are divided alike. “Nothing shared” is the "
        "same lengths with prompts that no cache has seen.",
    ]
    trace = parameters["trace"]
    if trace is not None:
        notes.append(
            f"Real trace: {trace['origin']}; {trace['requests']} requests, {trace['weighted_hit']:.1%} hit by tokens, "
            f"{trace['share_above_95']:.0%} of requests above 95 % (sha256 {trace['sha256'][:16]})."
        )
        notes += trace.get("notes", [])
    elif not parameters["quick"]:
        notes.append("The real agentic trace is not present here (PDDBED_TRACES names its folder): not run.")
    return notes
