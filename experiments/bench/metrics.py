"""Metrics of a run as a flat summary: `vllm bench serve`'s names, and `pdd_*` where the server is pddbed. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from experiments.framework.figures import percentile

METRICS = ("ttft", "tpot", "e2el")


def parse(texts: Iterable[str]) -> dict[str, float]:
    """Limits in ms by metric. Raises ValueError with what is wrong."""
    limits: dict[str, float] = {}
    for text in texts:
        metric, colon, number = text.partition(":")
        if not colon or metric not in METRICS:
            raise ValueError(f"{text!r} is no limit; write one of {', '.join(f'{name}:MS' for name in METRICS)}")
        try:
            limit = float(number)
        except ValueError:
            limit = -1.0
        if not 0 <= limit < float("inf"):
            raise ValueError(f"{text!r}: the limit is a number of milliseconds, such as {metric}:500")
        if metric in limits:
            raise ValueError(f"{metric} has two limits, {limits[metric]:g} and {number}")
        limits[metric] = limit
    return limits


def is_good(row: Mapping[str, Any], limits: Mapping[str, float]) -> bool:
    """True if an answered request keeps all limits. An answer of one token has no tpot, and keeps that limit."""
    return all((row[metric] or 0.0) * 1000 <= limit for metric, limit in limits.items())


TIMES = ("ttft", "tpot", "itl", "e2el")
ALWAYS = (50.0, 90.0, 95.0, 99.0)
LATE_MS = 50.0  # of starting a request: traces have dozens that are due at one moment, and each takes half a ms
MOST_LATE = 0.01  # of the requests, and more than one: then the load was another one
Rows = Sequence[Mapping[str, Any]]


def percentile_name(value: float) -> str:
    """p99, p99.9: as vllm has it."""
    return f"p{value:g}"


def summarise(
    rows: Rows, duration_s: float, limits: Mapping[str, float], percentiles: Sequence[float] = ()
) -> dict[str, Any]:
    """From lines of requests.jsonl. Times are of answered requests; `*_throughput` per second of the whole run."""
    done = [row for row in rows if row["success"]]
    inputs, outputs = (sum(row[key] for row in done) for key in ("input_len", "output_len"))
    seconds = duration_s or math.inf
    found: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(rows) - len(done),
        "errors": dict(Counter(row["pdd_failure"] for row in rows if not row["success"]).most_common()),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_concurrent_requests": _most_at_once(rows),
    }
    if limits:
        good = sum(is_good(row, limits) for row in done)
        found["request_goodput"] = good / seconds
        found["pdd_good_share"] = good / len(rows) if rows else 0.0
    asked = sorted({*ALWAYS, *percentiles})
    for metric in TIMES:
        found.update(_spread(f"{metric}_ms", [value * 1000 for value in _values(done, metric)], asked))
    found.update(_start(rows))
    found.update(_otherwise(done))
    found.update(_hit(done))
    if any("pdd_pipeline" in row for row in done):
        found.update(_of_the_lab(done, asked))
    return found


def _values(rows: Rows, metric: str) -> list[float]:
    """Values of all answers; `itl` of all their tokens."""
    if metric == "itl":
        return [gap for row in rows for gap in row["itl"]]
    return [row[metric] for row in rows if row[metric] is not None]


def _spread(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """mean_NAME, median_NAME, std_NAME, pQ_NAME; nothing of no value."""
    if not values:
        return {}
    ordered = sorted(values)
    found = {f"mean_{name}": fmean(ordered), f"median_{name}": percentile(ordered, 0.5), f"std_{name}": pstdev(ordered)}
    return found | {f"{percentile_name(q)}_{name}": percentile(ordered, q / 100) for q in percentiles}


def _otherwise(done: Rows) -> dict[str, Any]:
    """Answers and prompts that the server made shorter, and answers whose tokens it did not count."""
    short = [row for row in done if row.get("pdd_counted") and row["output_len"] < (row.get("pdd_asked_tokens") or 0)]
    cut = [row for row in done if (row.get("pdd_prompt_tokens") or row["input_len"]) < row["input_len"]]
    return {
        "pdd_short_answers": len(short),
        "pdd_cut_prompts": len(cut),
        "pdd_uncounted_answers": sum(not row.get("pdd_counted", True) for row in done),
    }


def _hit(done: Rows) -> dict[str, float]:
    """By tokens, of the requests whose hits are known: what the server's cache had, and what the load gives."""
    known = [(row, hit) for row in done if (hit := _cached_share(row)) is not None]
    tokens = sum(row["input_len"] for row, _ in known)
    if not tokens:
        return {}
    found = {"pdd_reached_hit": sum(hit * row["input_len"] for row, hit in known) / tokens}
    if all("pdd_expected_hit" in row for row, _ in known):
        found["pdd_expected_hit"] = sum(row["pdd_expected_hit"] * row["input_len"] for row, _ in known) / tokens
    return found


def _cached_share(row: Mapping[str, Any]) -> float | None:
    """Share of a prompt: as the lab's record has it, or as another server's usage does."""
    if "pdd_p_hit" in row:
        hit: float | None = row["pdd_p_hit"]
        return hit
    cached = row.get("pdd_cached_tokens")
    return None if cached is None else min(1.0, cached / row["input_len"])


def _most_at_once(rows: Rows) -> int:
    events = sorted([(row["pdd_start_s"], 1) for row in rows] + [(row["pdd_end_s"], -1) for row in rows])
    most = now = 0
    for _, step in events:
        now += step
        most = max(most, now)
    return most


def _start(rows: Rows) -> dict[str, Any]:
    """Lateness of the client against its schedule, where it had one, and what --concurrency and --in-turn held back."""
    late = [row["pdd_late_ms"] for row in rows if row["pdd_late_ms"] is not None]
    held = [row["pdd_held_ms"] for row in rows if row["pdd_held_ms"] > LATE_MS]
    found: dict[str, Any] = {}
    if late:
        found["pdd_late_starts"] = sum(value > LATE_MS for value in late)
        found["pdd_max_late_ms"] = max(late)
    if held:
        found["pdd_held_requests"] = len(held)
        found["pdd_max_held_ms"] = max(held)
    return found


def late_reasons(summary: Mapping[str, Any]) -> Iterator[str]:
    """Reasons why the load was not the one that was asked for."""
    sent = summary["completed"] + summary["failed"]
    late = summary.get("pdd_late_starts", 0)
    if late > max(1, MOST_LATE * sent):
        yield (
            f"the client could not keep to the schedule: {late} of {sent} requests started more than {LATE_MS:.0f} ms "
            f"late (the latest by {summary['pdd_max_late_ms']:.0f} ms)"
        )


def _of_the_lab(rows: Rows, percentiles: Sequence[float]) -> dict[str, Any]:
    """Figures of answered requests of a pddbed gateway, from the records that it keeps."""
    noted = [row for row in rows if "pdd_pipeline" in row]
    relay, main = (sum(row[f"pdd_{role}_tokens"] for row in noted) for role in ("rld", "md"))
    found: dict[str, Any] = {
        "pdd_pipelines": dict(Counter(row["pdd_pipeline"] for row in noted).most_common()),
        "pdd_rld_tokens": relay,
        "pdd_md_tokens": main,
        "pdd_rld_share": relay / (relay + main) if relay + main else None,
        "pdd_replays": sum(row["pdd_replays"] for row in noted),
        "pdd_recovered": sum(bool(row.get("pdd_recovery")) for row in noted),
        "pdd_losses": dict(
            Counter(loss.get("error", "?") for row in noted for loss in row.get("pdd_recovery") or ()).most_common()
        ),
        "pdd_without_kv_times": sum(bool(row.get("pdd_main")) and row["pdd_kv_xfer_ms"] is None for row in noted),
    }
    for cache in ("p", "md"):
        known = [row for row in noted if row[f"pdd_{cache}_hit"] is not None]
        tokens = sum(row["input_len"] for row in known)
        hit = sum(row[f"pdd_{cache}_hit"] * row["input_len"] for row in known)
        found[f"pdd_{cache}_hit"] = hit / tokens if tokens else None
    deltas = [row["pdd_delta_bytes"] for row in noted if row["pdd_delta_bytes"] is not None]
    found["pdd_total_delta_bytes"] = sum(deltas)
    found["pdd_mean_delta_bytes"] = fmean(deltas) if deltas else None
    for field in ("pdd_kv_queue_ms", "pdd_kv_xfer_ms", "pdd_handoff_pause_ms", "pdd_gateway_queue_ms"):
        found.update(_spread(field, [row[field] for row in noted if row[field] is not None], percentiles))
    behind = [1000 * (r["ttft"] - r["pdd_gateway_ttft"]) for r in noted if r["ttft"] and r["pdd_gateway_ttft"]]
    found.update(_spread("pdd_client_ttft_ms", behind, percentiles))
    modes = Counter(row["pdd_handoff_mode"] for row in noted if row["pdd_handoff_mode"])
    return found | ({"pdd_handoffs": dict(modes.most_common())} if modes else {})
