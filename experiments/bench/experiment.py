"""What a bench run's records come to: the same summary for the command and for `pddbed report DIR`. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.bench.metrics import late_reasons, percentile_name, summarise
from experiments.framework.experiment import Evaluation, Part, PartResult, Reported
from experiments.framework.figures import Figure
from experiments.report.charts import Chart, Series, cdf

PART = "bench"
SHOWN = (
    ("ttft", "time to first token"),
    ("tpot", "time per output token"),
    ("itl", "inter-token latency"),
    ("e2el", "whole answer"),
)
MOST_HIT_BEYOND = 0.05  # of tokens: more, and the caches knew the prompts from before


class Bench(Reported):
    """One part, reported as it is: nothing is published that it could meet or miss."""

    name = "bench"

    def evaluate(self, parameters: Mapping[str, Any], results: Mapping[str, tuple[Part, PartResult]]) -> Evaluation:
        _, result = results[PART]
        summary = {**summary_of(parameters, result), "complete": not result.facts["why"]}
        return Evaluation(_figures(summary, parameters["percentiles"]), _charts(result), notes(summary), summary)


def summary_of(parameters: Mapping[str, Any], result: PartResult) -> dict[str, Any]:
    """The flat summary. `parameters` and `result.facts` as run.json and part.json have them."""
    about = {key: parameters[key] for key in ("model", "num_prompts", "request_rate", "burstiness", "max_concurrency")}
    found = summarise(result.records, result.facts["duration_s"], parameters["goodput"], parameters["percentiles"])
    about["pdd_synthetic"] = parameters["synthetic"]
    return {**about, **found, **{f"pdd_{key}": result.facts[key] for key in ("expected_hit", "under_way", "not_sent")}}


def reasons_of(parameters: Mapping[str, Any], result: PartResult) -> list[str]:
    """Why the figures are not those of the load that was asked for, by the client's own account."""
    return list(_reasons(summary_of(parameters, result), result.facts))


def _reasons(summary: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[str]:
    yield from late_reasons(summary)
    if summary["pdd_synthetic"] and (words := _knew(summary)):
        yield words
    if facts["why"]:
        done = summary["completed"] + summary["failed"]
        words = {"gone": "the server was gone", "interrupted": "interrupted"}[facts["why"]]
        yield f"{words} after {done} of {summary['num_prompts']} requests"
    if facts["unrecorded"]:
        yield f"answered requests that left no record in the lab: {facts['unrecorded']}"


def notes(summary: Mapping[str, Any]) -> list[str]:
    """What a reader should know of the figures."""
    found = []
    if summary["errors"]:
        told = ", ".join(f"{reason}: {count}" for reason, count in summary["errors"].items())
        found.append(f"Failed requests by reason: {told}.")
    if summary["pdd_under_way"]:
        found.append(f"Under way at the end, and not counted: {summary['pdd_under_way']}.")
    if "pdd_held_requests" in summary and summary["request_rate"] != "inf":  # where it is, the cap is the pace
        found.append(
            f"Held back by --concurrency or --in-turn: {summary['pdd_held_requests']}, by up to "
            f"{summary['pdd_max_held_ms'] / 1000:.1f} s; a request's times begin when it is sent."
        )
    if not summary["pdd_synthetic"] and (words := _knew(summary)):
        found.append(words[0].upper() + words[1:] + ".")
    return found


def _knew(summary: Mapping[str, Any]) -> str:
    """That the caches hit more than the load gives by itself; nothing where they did not."""
    hit, expected = summary.get("pdd_p_hit"), summary["pdd_expected_hit"]
    if hit is None or hit <= expected + MOST_HIT_BEYOND:
        return ""
    return (
        f"prefill hit {hit:.0%} of the prompts' tokens where the load by itself gives {expected:.0%}: the caches knew "
        "prompts from an earlier run; another --seed makes other ones"
    )


def _figures(summary: Mapping[str, Any], percentiles: list[float]) -> list[Figure]:
    figures = [
        Figure("completed", "answered requests", "", (summary["completed"],), "check"),
        Figure("failed", "failed requests", "", (summary["failed"],), "check"),
        Figure("output_throughput", "output tokens a second", "1/s", (summary["output_throughput"],), "check"),
        Figure("request_throughput", "requests a second", "1/s", (summary["request_throughput"],), "check"),
    ]
    if "request_goodput" in summary:
        figures.append(
            Figure("request_goodput", "good requests a second", "1/s", (summary["request_goodput"],), "check")
        )
    for metric, words in SHOWN:
        for kind in ("mean", "median", *map(percentile_name, percentiles)):
            key = f"{kind}_{metric}_ms"
            if key in summary:
                figures.append(Figure(key, f"{words}, {kind}", "ms", (summary[key],), "check"))
    if summary.get("pdd_rld_share") is not None:
        figures.append(
            Figure("rld_share", "share of tokens made by relay decode", "share", (summary["pdd_rld_share"],), "check")
        )
    for cache, words in (("p", "prefill"), ("md", "main decode")):
        if summary.get(f"pdd_{cache}_hit") is not None:
            value = (summary[f"pdd_{cache}_hit"],)
            figures.append(Figure(f"{cache}_hit", f"hit rate of {words}'s cache, by tokens", "share", value, "check"))
    return figures


def _charts(result: PartResult) -> list[Chart]:
    done = [row for row in result.records if row["success"]]
    spread = [
        cdf(metric.upper(), [row[metric] for row in done if row[metric] is not None]) for metric in ("ttft", "e2el")
    ]
    gaps = [gap * 1000 for row in done for gap in row["itl"]]
    begun = [(row["pdd_start_s"], row["ttft"]) for row in done]
    return [
        Chart("Times of a request", "seconds", "% of requests at or below", spread, x_log=True),
        Chart(
            "Inter-token latency",
            "ms",
            "% of gaps at or below",
            [cdf("ITL", gaps[:: max(1, len(gaps) // 2000)])],
            x_log=True,
        ),
        Chart(
            "Time to first token over the run",
            "seconds since the beginning",
            "seconds",
            [Series("TTFT", begun, "dots")],
        ),
        Chart("Requests under way", "seconds since the beginning", "requests", [_under_way(result)]),
    ]


def _under_way(result: PartResult) -> Series:
    events = sorted(
        [(row["pdd_start_s"], 1) for row in result.records] + [(row["pdd_end_s"], -1) for row in result.records]
    )
    points, now = [], 0
    for at, step in events:
        now += step
        points.append((at, float(now)))
    return Series("under way", points, "step")
