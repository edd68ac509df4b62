"""The pictures of `ttft`: times to the first token, hit rates over time, and where tokens are made. Pure."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.report.charts import Chart, Mark, Series, cdf
from experiments.sim.outcome import SLA_P90_S, SLA_P99_S, Run
from experiments.ttft.figures import Row, lag, title

Rows = Mapping[str, Row]
WINDOWS = 20


def ttft_chart(rows: Rows) -> Chart:
    """Without what only `consistency` is about."""
    series = [
        cdf(title(name), [value / 1000 for value in row.column("ttft_ms")])
        for name, row in rows.items()
        if name != "pdd-end-on-rld"
    ]
    marks = [Mark(SLA_P90_S, "SLA: P90"), Mark(SLA_P99_S, "SLA: P99")]
    return Chart(
        "Time to the first token",
        "seconds, at the deployment's scale",
        "% of requests",
        series,
        marks,
        caption="The SLA asks that 90 % of requests are left of its first mark, and 99 % left of its second. The relay "
        "takes the KV transfer out of the wait: PDD is where a single datacenter (IDC-PD) is. Sending chunks while "
        "prefill computes takes most of it out as well.",
    )


def tail_chart(rows: Rows, runs: Mapping[str, Sequence[Run]]) -> Chart:
    """The slowest tenth, lab and simulator."""
    series = []
    for name in ("pdd", "cdc-pd"):
        if name in rows:
            series.append(_tail(f"{title(name)}, lab", [value / 1000 for value in rows[name].column("ttft_ms")]))
            if runs.get(name):
                simulated = [one.ttft_s for run in runs[name] for one in run.outcomes]
                series.append(_tail(f"{title(name)}, simulator", simulated))
    marks = [Mark(90, "P90"), Mark(99, "P99")]
    text = "Published: PDD 9.8 and 14.4 s, CDC-PD 18.3 and about 30 s."
    return Chart(
        "The slow end, lab and simulator", "% of requests", "seconds to the first token", series, marks, False, text
    )


def _tail(name: str, values: Sequence[float]) -> Series:
    ordered = sorted(values)
    count = len(ordered)
    points = [(100 * (index + 1) / count, value) for index, value in enumerate(ordered) if index >= 0.8 * count]
    return Series(name, points)


def hits_chart(rows: Rows) -> Chart:
    """Distance of main decode's hit rate from prefill's: means over windows of requests, seeds together."""
    series = []
    for name, words in (("pdd", "with hand-over"), ("pdd-end-on-rld", "what ends on the relay dropped")):
        if name in rows:
            series.append(Series(words, _windows(rows[name])))
    return Chart(
        "Main decode's hit rate behind prefill's",
        "% of the run",
        "percentage points, mean",
        series,
        caption="With hand-over main decode holds what prefill holds. Where what ends on the relay is dropped, main "
        "decode lacks those prompts in their next turn: misses breed misses.",
    )


def _windows(row: Row) -> list[tuple[float, float]]:
    points = []
    for window in range(WINDOWS):
        found: list[float] = []
        for records in row.by_seed:
            begin, end = (round(edge * len(records) / WINDOWS) for edge in (window, window + 1))
            found += [100 * lag(one) for one in records[begin:end]]
        if found:
            points.append((100 * (window + 0.5) / WINDOWS, fmean(found)))
    return points


def split_chart(row: Row) -> Chart:
    """Tokens on the relay by what had to cross the WAN."""
    points = [
        (float(one["pdd_kv_xfer_ms"] + one["pdd_kv_queue_ms"]) / 1000 * _faster(one), float(one["pdd_rld_tokens"]))
        for one in row.all
        if one["pdd_pipeline"] == "p-rld-md" and one.get("pdd_kv_xfer_ms") is not None
    ]
    return Chart(
        "Tokens that the relay makes",
        "seconds that the KV took to main decode, at the deployment's scale",
        "tokens of the lab",
        [Series("requests over the relay", points, "dots")],
        caption="The relay answers while the KV is on its way: a line. What lies below it was a shorter answer.",
    )


def _faster(one: Mapping[str, Any]) -> float:
    return float(one["kv_xfer_ms"] / one["pdd_kv_xfer_ms"]) if one["pdd_kv_xfer_ms"] else 1.0
