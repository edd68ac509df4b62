"""Report of a bench run from its records: summary, figures, notes, and why it is not faithful. Pure.

The command and `pddbed report DIR` have the same one.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.bench.load import changes_in_words
from experiments.bench.metrics import late_reasons, percentile_name, summarise
from experiments.framework.base import Evaluation, Part, PartResult, Reported
from experiments.framework.figures import Figure
from experiments.report.charts import Chart, Series, cdf

MOST_HIT_SHORT = 0.01  # of a trace's tokens: by more, and it is another load for the caches than the trace's
MOST_HIT_BEYOND = 0.05  # of tokens: more, and the caches knew the prompts from before; a made-up load may lack as much


def reasons(summary: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[str]:
    """Reasons why the figures are not those of the load that was asked for."""
    yield from late_reasons(summary)
    if summary["pdd_synthetic"] and (words := _knew(summary)):
        yield words
    if words := _fell_short(summary):
        yield words
    if summary["pdd_ignore_eos"] and (short := summary["pdd_short_answers"]):
        yield (
            f"the server ended {short} of {summary['completed']} answers before the length that was asked for; "
            "--no-ignore-eos asks for none"
        )
    if cut := summary["pdd_cut_prompts"]:
        yield f"the server counts fewer tokens than were sent in {cut} of {summary['completed']} prompts: it cut them"
    if recovered := summary.get("pdd_recovered"):
        losses = ", ".join(f"{name}: {count}" for name, count in summary["pdd_losses"].items())
        yield f"requests that lost a worker and went on elsewhere or again: {recovered} ({losses})"
    if facts["why"]:
        done = summary["completed"] + summary["failed"]
        words = {"gone": "the server was gone", "interrupted": "interrupted"}[facts["why"]]
        yield f"{words} after {done} of {summary['num_prompts']} requests"
    for loss in facts.get("lost", ()):
        yield f"the lab was not whole: {loss}"
    if facts["unrecorded"]:
        yield f"answered requests that left no record in the lab: {facts['unrecorded']}"
    if facts.get("damaged"):
        yield f"lines of the lab's records that could not be read: {facts['damaged']}"


def notes(summary: Mapping[str, Any]) -> list[str]:
    """Notes for a reader of the figures."""
    found = [*summary["pdd_trace_notes"], *_pace(summary)]
    found += changes_in_words(summary["pdd_changed"], summary["pdd_trace_requests"])
    if summary["errors"]:
        told = ", ".join(f"{reason}: {count}" for reason, count in summary["errors"].items())
        found.append(f"Failed requests by reason: {told}. They are in no time and no percentile.")
    if summary["pdd_under_way"]:
        found.append(f"Under way at the end, and not counted: {summary['pdd_under_way']}.")
    if summary["pdd_not_sent"]:
        found.append(f"Not sent: {summary['pdd_not_sent']}.")
    if summary["pdd_uncounted_answers"]:
        found.append(
            f"Answers whose tokens the server did not count: {summary['pdd_uncounted_answers']}; each chunk with text "
            "is taken for one."
        )
    if not summary["pdd_ignore_eos"] and summary["pdd_short_answers"]:
        found.append(f"Answers that ended before the length asked for: {summary['pdd_short_answers']}.")
    if summary.get("pdd_without_kv_times"):
        found.append(
            "Requests of main decode without a KV transfer in their record, and in no KV figure: "
            f"{summary['pdd_without_kv_times']}."
        )
    if "pdd_held_requests" in summary and summary["request_rate"] != "inf":  # where it is, the cap is the pace
        found.append(
            f"Held back by --concurrency or --in-turn: {summary['pdd_held_requests']}, by up to "
            f"{summary['pdd_max_held_ms'] / 1000:.1f} s; a request's times begin when it is sent."
        )
    if played := summary.get("pdd_link_changes", {}).get("timeline"):
        found.append(f"A timeline changed the links while the requests were under way: {played} times.")
    if not summary["pdd_synthetic"]:
        found.append(_hit_words(summary))
        if words := _knew(summary):
            found.append(words[0].upper() + words[1:] + ".")
    return found


def _pace(summary: Mapping[str, Any]) -> Iterator[str]:
    """Changes of a trace's prompts and times by options."""
    if summary["pdd_synthetic"]:
        return
    if summary["pdd_divide"] > 1:
        yield f"Prompts and blocks are divided by {summary['pdd_divide']}."
    if summary["pdd_speedup"] != 1:
        yield f"The trace's times are divided by {summary['pdd_speedup']:g}."
    if summary["request_rate"] != "trace":
        rate = "at once" if summary["request_rate"] == "inf" else f"at {summary['request_rate']:g} requests a second"
        yield f"The trace's times are not used: requests are sent {rate}."


def _hit_words(summary: Mapping[str, Any]) -> str:
    """Hit rate of a cache that begins empty and forgets nothing, by the trace, and the one that was reached."""
    reached = summary.get("pdd_reached_hit")
    words = "the server does not tell its own" if reached is None else f"reached were {reached:.1%}"
    return f"Hit rate of the trace by itself: {summary['pdd_expected_hit']:.1%} of the prompts' tokens; {words}."


def _fell_short(summary: Mapping[str, Any]) -> str:
    """Sentence that the caches hit less than the load gives by itself; nothing where they did not."""
    hit, expected = summary.get("pdd_reached_hit"), summary["pdd_expected_hit"]
    most = MOST_HIT_BEYOND if summary["pdd_synthetic"] else MOST_HIT_SHORT
    if hit is None or hit >= expected - most:
        return ""
    return (
        f"prefill hit {hit:.1%} of the prompts' tokens where the load by itself gives {expected:.1%}: caches too "
        "small, several of them, or prompts that came before what they repeat was computed"
    )


def _knew(summary: Mapping[str, Any]) -> str:
    """Sentence that the caches hit more than the load gives by itself; nothing where they did not."""
    hit, expected = summary.get("pdd_reached_hit"), summary["pdd_expected_hit"]
    if hit is None or hit <= expected + MOST_HIT_BEYOND:
        return ""
    return (
        f"prefill hit {hit:.0%} of the prompts' tokens where the load by itself gives {expected:.0%}: the caches knew "
        "prompts from an earlier run; another --seed makes other ones"
    )


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
    """Reasons why the figures are not those of the load that was asked for, by the client's own account."""
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
