"""What a reader has to know beside a run's figures: what was left out or came otherwise, and why a run is not faithful.

From the flat summary, so that a run's directory tells it again. Pure.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.bench.load import changes_in_words
from experiments.bench.metrics import late_reasons

MOST_HIT_SHORT = 0.01  # of a trace's tokens: by more, and it is another load for the caches than the trace's
MOST_HIT_BEYOND = 0.05  # of tokens: more, and the caches knew the prompts from before; a made-up load may lack as much


def reasons(summary: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[str]:
    """Why the figures are not those of the load that was asked for."""
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
    """What a reader should know of the figures."""
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
    """What became of a trace's prompts and times by options."""
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
    """What a cache that begins empty and forgets nothing would hit in the trace, and what was hit."""
    reached = summary.get("pdd_reached_hit")
    words = "the server does not tell its own" if reached is None else f"reached were {reached:.1%}"
    return f"Hit rate of the trace by itself: {summary['pdd_expected_hit']:.1%} of the prompts' tokens; {words}."


def _fell_short(summary: Mapping[str, Any]) -> str:
    """That the caches hit less than the load gives by itself; nothing where they did not."""
    hit, expected = summary.get("pdd_reached_hit"), summary["pdd_expected_hit"]
    most = MOST_HIT_BEYOND if summary["pdd_synthetic"] else MOST_HIT_SHORT
    if hit is None or hit >= expected - most:
        return ""
    return (
        f"prefill hit {hit:.1%} of the prompts' tokens where the load by itself gives {expected:.1%}: caches too "
        "small, several of them, or prompts that came before what they repeat was computed"
    )


def _knew(summary: Mapping[str, Any]) -> str:
    """That the caches hit more than the load gives by itself; nothing where they did not."""
    hit, expected = summary.get("pdd_reached_hit"), summary["pdd_expected_hit"]
    if hit is None or hit <= expected + MOST_HIT_BEYOND:
        return ""
    return (
        f"prefill hit {hit:.0%} of the prompts' tokens where the load by itself gives {expected:.0%}: the caches knew "
        "prompts from an earlier run; another --seed makes other ones"
    )
