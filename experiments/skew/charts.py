"""The pictures of `skew`: transfer times, the queue as it grows, and the line that the fit claims. Pure."""

from collections.abc import Mapping

from experiments.framework.base import Part, PartResult
from experiments.report.charts import Chart, Mark, Series, cdf
from experiments.skew.fit import TARGET_SKEWED_MS, TARGET_UNIFORM_MS, Fit
from experiments.traces.hit_rates import DISTRIBUTIONS

Rows = Mapping[str, list[tuple[Part, PartResult]]]


def all_charts(rows: Rows, fit: Fit) -> list[Chart]:
    return [_times(rows), _queue(rows, fit), _line(rows, fit)]


def _all(rows: Rows, row: str, key: str) -> list[float]:
    return [record[key] for _, result in rows[row] for record in result.records]


def _times(rows: Rows) -> Chart:
    marks = [
        Mark(TARGET_SKEWED_MS, f"published P50, skewed: {TARGET_SKEWED_MS:.0f} ms"),
        Mark(TARGET_UNIFORM_MS, f"published P50, uniform: {TARGET_UNIFORM_MS:.0f} ms"),
    ]
    return Chart(
        "KV transfer time",
        "ms from having a connection to the receiver's confirmation",
        "% of transfers",
        [cdf(row, _all(rows, row, "pdd_kv_held_ms")) for row in rows],
        marks,
        caption="Distribution over all seeds. Where a curve crosses 50 %, its median is read off.",
    )


def _queue(rows: Rows, fit: Fit) -> Chart:
    """The first seed of each row, as measured, and as a first-come queue says."""
    series = []
    for row, pairs in rows.items():
        part, result = pairs[0]
        ordered = sorted(result.records, key=lambda record: float(record["arrival_s"]))
        series.append(Series(row, [(record["arrival_s"], record["pdd_kv_queue_ms"]) for record in ordered]))
        if row == "uniform":
            rates, spacing_ms = DISTRIBUTIONS[part.detail["distribution"]], part.detail["spacing_ms"]
            waited = fit.predict_waits_ms(rates, part.detail["transfers"], part.seed, spacing_ms)
            points = [(index * spacing_ms / 1000, wait) for index, wait in enumerate(waited)]
            series.append(Series("uniform, as the queue model says", points))
    return Chart(
        "Queueing for a connection",
        "s since the first arrival",
        "ms waited",
        series,
        caption="Arrivals are a few percent faster than the pool can take with uniform hit rates, so the queue "
        "grows for as long as the run lasts. First seed.",
    )


def _line(rows: Rows, fit: Fit) -> Chart:
    points = [
        (100 * (1 - record["pdd_md_hit"]), record["pdd_kv_held_ms"])
        for row in ("skewed", "uniform")
        for _, result in rows.get(row, [])
        for record in result.records
    ]
    model = [(miss, fit.hold_ms(miss / 100)) for miss in (0.0, 100.0)]
    return Chart(
        "Transfer time by miss rate",
        "% of the prompt that the receiver lacks",
        "ms",
        [Series("transfers", points, "dots"), Series("base + miss x whole prompt, fitted", model)],
        caption="The fit's claim: a transfer takes the round trip and its bytes' time, whatever else is under way.",
    )
