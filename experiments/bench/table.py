"""The table that `vllm bench serve` prints, line for line, and pddbed's own sections under it. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.bench.metrics import percentile_name
from testbed.model.units import short_size

WIDTH = 50
SECTIONS = (
    ("ttft", "Time to First Token", "TTFT"),
    ("tpot", "Time per Output Token (excl. 1st token)", "TPOT"),
    ("itl", "Inter-token Latency", "ITL"),
    ("e2el", "End-to-end Latency", "E2EL"),
)
SPREADS = (
    ("pdd_kv_queue_ms", "KV queue"),
    ("pdd_kv_xfer_ms", "KV transfer"),
    ("pdd_handoff_pause_ms", "hand-over pause"),
)
Summary = Mapping[str, Any]


def table(summary: Summary, percentiles: Sequence[float]) -> str:
    """`percentiles`: those that are shown, from 0 to 100."""
    return "\n".join(line.rstrip() for line in [*_vllm(summary, percentiles), *_pddbed(summary), "=" * WIDTH])


def _line(words: str, value: Any) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{words:<40} {text:<9}"


def _title(words: str, fill: str = "-") -> str:
    return f"{words:{fill}^{WIDTH}}"


def _vllm(summary: Summary, percentiles: Sequence[float]) -> Iterator[str]:
    yield _title(" Serving Benchmark Result ", "=")
    yield _line("Successful requests:", summary["completed"])
    yield _line("Failed requests:", summary["failed"])
    if summary.get("max_concurrency") is not None:
        yield _line("Maximum request concurrency:", summary["max_concurrency"])
    if isinstance(summary.get("request_rate"), float):
        yield _line("Request rate configured (RPS):", summary["request_rate"])
    if before := summary.get("pdd_warm_up", 0) + summary.get("pdd_sent_first", 0):
        yield _line("Sent before, not measured:", before)
    yield _line("Benchmark duration (s):", summary["duration"])
    yield _line("Total input tokens:", summary["total_input_tokens"])
    yield _line("Total generated tokens:", summary["total_output_tokens"])
    yield _line("Request throughput (req/s):", summary["request_throughput"])
    if "request_goodput" in summary:
        yield _line("Request goodput (req/s):", summary["request_goodput"])
        yield _line("Requests within the limits (%):", 100 * summary["pdd_good_share"])
    yield _line("Output token throughput (tok/s):", summary["output_throughput"])
    yield _line("Peak concurrent requests:", summary["max_concurrent_requests"])
    yield _line("Total token throughput (tok/s):", summary["total_token_throughput"])
    for metric, title, short in SECTIONS:
        if f"mean_{metric}_ms" not in summary:
            continue
        yield _title(title)
        yield _line(f"Mean {short} (ms):", summary[f"mean_{metric}_ms"])
        yield _line(f"Median {short} (ms):", summary[f"median_{metric}_ms"])
        for value in percentiles:
            name = percentile_name(value)
            yield _line(f"{name.upper()} {short} (ms):", summary[f"{name}_{metric}_ms"])


def _pddbed(summary: Summary) -> Iterator[str]:
    """Hit rate of another server where it tells it."""
    if "pdd_pipelines" not in summary:
        if "pdd_reached_hit" in summary:
            yield _title("Caches")
            yield from _hits(summary)
        return
    yield _title("Pipelines and Roles")
    yield _line("Requests by pipeline:", _counts(summary["pdd_pipelines"]))
    yield _line("Tokens made by relay decode:", summary["pdd_rld_tokens"])
    yield _line("Tokens made by main decode:", summary["pdd_md_tokens"])
    if summary["pdd_rld_share"] is not None:
        yield _line("Relay's share of tokens (%):", 100 * summary["pdd_rld_share"])
    if "pdd_handoffs" in summary:
        yield _line("Hand-overs:", _counts(summary["pdd_handoffs"]))
    if summary["pdd_replays"]:
        yield _line("Replays after a loss:", summary["pdd_replays"])
    yield from _both(summary, "pdd_client_ttft_ms", "TTFT around gateway")
    yield _title("Caches and KV")
    yield from _hits(summary)
    if summary["pdd_md_hit"] is not None:
        yield _line("Main decode hit rate (%):", 100 * summary["pdd_md_hit"])
    if summary["pdd_mean_delta_bytes"] is not None:
        yield _line("Delta KV over the WAN:", short_size(summary["pdd_total_delta_bytes"]))
        yield _line("Delta KV, mean of a request:", short_size(summary["pdd_mean_delta_bytes"]))
    for key, words in SPREADS:
        yield from _both(summary, key, words)


def _hits(summary: Summary) -> Iterator[str]:
    if "pdd_reached_hit" in summary:
        yield _line("Prefill hit rate, by tokens (%):", 100 * summary["pdd_reached_hit"])
        if "pdd_expected_hit" in summary:
            yield _line("Hit rate of the load by itself (%):", 100 * summary["pdd_expected_hit"])


def _both(summary: Summary, key: str, words: str) -> Iterator[str]:
    if f"mean_{key}" in summary:
        yield _line(f"Median / P99 {words} (ms):", f"{summary[f'median_{key}']:.2f} / {summary[f'p99_{key}']:.2f}")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
