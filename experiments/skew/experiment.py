"""`pddbed experiment run skew`: what is asked of it and what its records come to.

A transfer's time is counted from when it has a connection of the pool until the receiver's confirmation is back: as
long as the connection is taken. Its queueing time is what it waited for the connection.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.framework.base import Evaluation, Experiment, Options, Part, PartResult, Session
from experiments.framework.checks import bytes_figure
from experiments.framework.figures import Figure, percentile, within
from experiments.framework.lab import ExperimentLab
from experiments.skew import charts
from experiments.skew.fit import (
    CONNECTIONS,
    TARGET_QUEUEING_MS,
    TARGET_SKEWED_MS,
    TARGET_UNIFORM_MS,
    TOPOLOGY,
    TRANSFERS,
    Fit,
    as_json,
)
from experiments.skew.runs import PREDICTED, open_session, parts, shape
from experiments.traces.hit_rates import DISTRIBUTIONS, SKEWED, UNIFORM, draw

ORIGIN = "PDD publication"
Results = Mapping[str, tuple[Part, PartResult]]


class Skew(Experiment):
    name = "skew"
    title = "skew: KV transfer times by hit rate"
    claim = (
        "With skewed hit rates (70-80 % of requests above 95 %) KV takes 248 ms at the median to cross; with hit rates "
        "spread evenly 1210 ms, after 1682 ms of queueing for a connection."
    )
    with_workers = False  # the workers' own transport runs in the hosts instead, with plain memory

    def topology(self, options: Options) -> Path:
        return TOPOLOGY

    def parameters(self, options: Options) -> dict[str, Any]:
        fit, size = Fit.read(), shape(options)
        return {
            "fit": as_json(fit),
            "load_over_uniform_capacity": round(fit.load, 4),
            "connections": CONNECTIONS,
            "connection_bps": fit.connection_bps(size.bytes),
            "prompt": {**asdict(size), "bytes": size.bytes},
            "seeds": options.seeds,
            "quick": options.quick,
            "distributions": {
                rates.name: {"knots": rates.knots, "mean": rates.mean}
                for rates in (SKEWED, UNIFORM, *(row.rates for row in PREDICTED))
            },
        }

    def parts(self, options: Options) -> list[Part]:
        return parts(options, Fit.read())

    def session(self, lab: ExperimentLab, options: Options) -> AbstractContextManager[Session]:
        size = shape(options)
        return open_session(lab, size, Fit.read().connection_bps(size.bytes))

    def evaluate(self, parameters: Mapping[str, Any], results: Results) -> Evaluation:
        fit = Fit(**parameters["fit"])
        rows = {row: [pair for pair in results.values() if pair[0].detail["row"] == row] for row in _row_names(results)}
        figures = [*_published(rows), *_predicted(rows, fit), bytes_figure(results)]
        summary = {
            f"{kind}_{name}": value
            for name, pairs in rows.items()
            for kind, value in _summary([record for _, result in pairs for record in result.records]).items()
        }
        return Evaluation(figures, charts.all_charts(rows, fit), _notes(parameters, fit), summary)


def _row_names(results: Results) -> list[str]:
    return list(dict.fromkeys(part.detail["row"] for part, _ in results.values()))


def column(result: PartResult, key: str) -> list[float]:
    return [record[key] for record in result.records]


def _published(rows: Mapping[str, list[tuple[Part, PartResult]]]) -> list[Figure]:
    figures = []
    for row, target, fitted in (
        ("skewed", TARGET_SKEWED_MS, "the round trip"),
        ("uniform", TARGET_UNIFORM_MS, "a connection's bandwidth"),
    ):
        values = [percentile(column(result, "pdd_kv_held_ms"), 0.5) for _, result in rows.get(row, [])]
        text = f"P50 KV transfer, {row} hit rates"
        figures.append(within(f"p50_transfer_{row}", text, "ms", values, target, 0.10, "fitted", fit=fitted))
    queueing = {row: [_mean(column(result, "pdd_kv_queue_ms")) for _, result in pairs] for row, pairs in rows.items()}
    uniform = queueing.get("uniform", [])
    text = "mean queueing for a connection, uniform"
    if all(part.detail["transfers"] == TRANSFERS for part, _ in rows.get("uniform", [])):
        fitted = "the arrivals' spacing"
        figure = within("mean_queueing", text, "ms", uniform, TARGET_QUEUEING_MS, 0.15, "fitted", fit=fitted)
    else:
        note = f"published of {TRANSFERS} transfers or so: the queue of a short run is shorter"
        figure = Figure("mean_queueing", text, "ms", tuple(uniform), "fitted", TARGET_QUEUEING_MS, note=note)
    figures.append(figure)
    share = [
        sum(hit > 0.95 for hit in column(result, "pdd_md_hit")) / len(result.records)
        for _, result in rows.get("skewed", [])
    ]
    text = "requests above 95 % hit, skewed"
    figures.append(Figure("share_above_95", text, "share", tuple(share), "configured", None, 0.70, 0.80))
    text = "mean queueing, skewed, same arrivals"
    note = "the pool is a third busy: hardly anybody waits"
    skewed = tuple(queueing.get("skewed", []))
    figures.append(Figure("mean_queueing_skewed", text, "ms", skewed, "predicted", 0.0, -1.0, 5.0, note=note))
    return figures


def _predicted(rows: Mapping[str, list[tuple[Part, PartResult]]], fit: Fit) -> list[Figure]:
    """Each row against what the fitted parameters and a first-come queue say, draw by draw."""
    figures = []
    for row, pairs in rows.items():
        held, expected_held, queued, expected_queued = [], [], [], []
        for part, result in pairs:
            rates = DISTRIBUTIONS[part.detail["distribution"]]
            count = part.detail["transfers"]
            expected_held.append(percentile([fit.hold_ms(m) for m in draw(rates, count, part.seed)], 0.5))
            expected_queued.append(_mean(fit.predict_waits_ms(rates, count, part.seed, part.detail["spacing_ms"])))
            held.append(percentile(column(result, "pdd_kv_held_ms"), 0.5))
            queued.append(_mean(column(result, "pdd_kv_queue_ms")))
        note = "against the fitted parameters and a first-come queue"
        if row not in ("skewed", "uniform"):
            text, key = f"P50 KV transfer, {row}", row.replace(" ", "_")
            target = _mean(expected_held)
            figures.append(within(f"p50_transfer_{key}", text, "ms", held, target, 0.10, "predicted", note=note))
        target = _mean(expected_queued)
        if target > 100 and (row != "uniform" or pairs[0][0].detail["transfers"] < TRANSFERS):
            text, key = f"mean queueing, {row}", f"predicted_queueing_{row.replace(' ', '_')}"
            figures.append(within(key, text, "ms", queued, target, 0.25, "predicted", note=note))
    return figures


def _summary(records: list[Mapping[str, Any]]) -> dict[str, float]:
    """Flat names for summary.json, in vllm's manner."""
    found: dict[str, float] = {"completed": len(records)}
    for field in ("pdd_kv_held_ms", "pdd_kv_xfer_ms", "pdd_kv_queue_ms"):
        values = [record[field] for record in records]
        name = field.removeprefix("pdd_")
        found |= {f"mean_{name}": _mean(values), f"median_{name}": percentile(values, 0.5)}
        found |= {f"p{share}_{name}": percentile(values, share / 100) for share in (90, 99)}
    return found


def _notes(parameters: Mapping[str, Any], fit: Fit) -> list[str]:
    prompt = parameters["prompt"]
    return [
        "Every byte crossed the emulated WAN through the workers' own connection pool (workers/wire: handshake, pool "
        f"of {parameters['connections']}, frames, checksums, confirmations) between processes in the lab's hosts p0 "
        f"and md0. There is no model: KV is {prompt['bytes']:,} bytes of memory a whole prompt, so bytes are scaled "
        "and times are kept.",
        f"A connection has {parameters['connection_bps'] / 1e6:.2f} Mbit/s of its own (TCP pacing), and the link room "
        "for all of them. A transfer's time lasts from having a connection to the receiver's confirmation.",
        f"Arrivals are evenly spaced, {fit.spacing_ms:.1f} ms apart: {fit.load - 1:.1%} above what the pool can take "
        f"with uniform hit rates. Miss rates are stratified in groups of 16. Fit: {fit.how}.",
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
