"""What a bench run's records come to: the same summary for the command and for `pddbed report DIR`. Pure."""

from collections.abc import Mapping
from typing import Any

from experiments.bench.metrics import percentile_name, summarise
from experiments.bench.notes import notes, reasons
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
ASKED: tuple[tuple[str, Any], ...] = (  # parameters that older runs lack, and what they were then
    ("changed", {}),
    ("trace_requests", 0),
    ("trace_notes", []),
    ("divide", 1),
    ("speedup", 1.0),
    ("warm_up", 0),
    ("sent_first", 0),
    ("ignore_eos", False),
)


class Bench(Reported):
    """One part, reported as it is: nothing is published that it could meet or miss."""

    name = "bench"

    def evaluate(self, parameters: Mapping[str, Any], results: Mapping[str, tuple[Part, PartResult]]) -> Evaluation:
        _, result = results[PART]
        summary = {**summary_of(parameters, result), "complete": not result.facts["why"]}
        return Evaluation(_figures(summary, parameters["percentiles"]), _charts(result), notes(summary), summary)


def summary_of(parameters: Mapping[str, Any], result: PartResult) -> dict[str, Any]:
    """The flat summary. `parameters` and `result.facts` as run.json and part.json have them, older ones as well."""
    about = {key: parameters[key] for key in ("model", "num_prompts", "request_rate", "burstiness", "max_concurrency")}
    about["pdd_synthetic"] = parameters["synthetic"]
    about |= {f"pdd_{key}": parameters.get(key, default) for key, default in ASKED}
    about |= {f"pdd_{key}": result.facts[key] for key in ("expected_hit", "under_way", "not_sent")}
    if links := result.facts.get("links"):
        about["pdd_link_settings"] = links["settings"]
        about["pdd_link_changes"] = {by: n for told in links["changes"].values() for by, n in told["by"].items()}
    found = summarise(result.records, result.facts["duration_s"], parameters["goodput"], parameters["percentiles"])
    return {**about, **found}


def reasons_of(parameters: Mapping[str, Any], result: PartResult) -> list[str]:
    """Why the figures are not those of the load that was asked for, by the client's own account."""
    return list(reasons(summary_of(parameters, result), result.facts))


FIGURES = (  # key in the summary, words, unit; the terminal's table has the same
    ("completed", "answered requests", ""),
    ("failed", "failed requests", ""),
    ("pdd_warm_up", "short requests sent before, not measured", ""),
    ("pdd_sent_first", "requests of the load sent before, not measured", ""),
    ("duration", "duration", "s"),
    ("total_input_tokens", "tokens of all prompts", ""),
    ("total_output_tokens", "tokens of all answers", ""),
    ("request_throughput", "requests a second", "1/s"),
    ("request_goodput", "good requests a second", "1/s"),
    ("pdd_good_share", "requests within the limits", "share"),
    ("output_throughput", "output tokens a second", "1/s"),
    ("total_token_throughput", "tokens a second, prompts included", "1/s"),
    ("max_concurrent_requests", "requests under way, most", ""),
)
LAB_FIGURES = (
    ("pdd_rld_tokens", "tokens made by relay decode", ""),
    ("pdd_md_tokens", "tokens made by main decode", ""),
    ("pdd_rld_share", "share of tokens made by relay decode", "share"),
    ("pdd_replays", "replays after a loss", ""),
    ("pdd_recovered", "requests that lost a worker", ""),
    ("pdd_expected_hit", "hit rate of the load by itself, by tokens", "share"),
    ("pdd_reached_hit", "hit rate reached, by tokens", "share"),
    ("pdd_p_hit", "hit rate of prefill's cache, by tokens", "share"),
    ("pdd_md_hit", "hit rate of main decode's cache, by tokens", "share"),
    ("pdd_total_delta_bytes", "delta KV over the WAN", "B"),
    ("pdd_mean_delta_bytes", "delta KV over the WAN, mean of a request", "B"),
)
LAB_COUNTS = (("pdd_pipelines", "requests on pipeline"), ("pdd_handoffs", "hand-overs by"))
LAB_TIMES = (
    ("pdd_kv_queue_ms", "KV queue"),
    ("pdd_kv_xfer_ms", "KV transfer"),
    ("pdd_handoff_pause_ms", "pause at the hand-over"),
    ("pdd_client_ttft_ms", "time to first token around the gateway"),
)
TOLD = (  # what was left out or happened otherwise, where it did
    ("pdd_not_sent", "requests not sent"),
    ("pdd_under_way", "requests under way at the end, not counted"),
    ("pdd_late_starts", "requests started late"),
    ("pdd_held_requests", "requests held back by --concurrency or --in-turn"),
    ("pdd_short_answers", "answers shorter than asked for"),
    ("pdd_cut_prompts", "prompts cut by the server"),
    ("pdd_uncounted_answers", "answers whose tokens the server did not count"),
    ("pdd_without_kv_times", "requests of main decode without a KV transfer in their record"),
)


def _figures(summary: Mapping[str, Any], percentiles: list[float]) -> list[Figure]:
    """Everything that the terminal's table has, and what was left out."""

    def figure(key: str, words: str, unit: str, value: float | None = None) -> list[Figure]:
        """Nothing where the summary has no value."""
        found = summary.get(key) if value is None else value
        return [] if found is None else [Figure(key.removeprefix("pdd_"), words, unit, (found,), "check")]

    figures = [one for key, words, unit in FIGURES for one in figure(key, words, unit)]
    for metric, words in SHOWN:
        for kind in ("mean", "median", *map(percentile_name, percentiles)):
            figures += figure(f"{kind}_{metric}_ms", f"{words}, {kind}", "ms")
    for key, words in LAB_COUNTS:
        for name, count in summary.get(key, {}).items():
            figures += figure(f"{key} {name}", f"{words} {name}", "", count)
    hits = "pdd_p_hit" if "pdd_p_hit" in summary else "pdd_reached_hit"  # the same, of another server
    told = [row for row in LAB_FIGURES if row[0] == hits or row[0] not in ("pdd_p_hit", "pdd_reached_hit")]
    figures += [one for key, words, unit in told for one in figure(key, words, unit)]
    for key, words in LAB_TIMES:
        for kind in dict.fromkeys(("median", "p99", *map(percentile_name, percentiles))):
            figures += figure(f"{kind}_{key}", f"{words}, {kind}", "ms")
    figures += [one for key, words in TOLD if summary.get(key) for one in figure(key, words, "")]
    for name, count in summary["pdd_changed"].items():
        figures += figure(f"changed {name}", f"of the trace: {name.replace('_', ' ')}", "", count)
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
