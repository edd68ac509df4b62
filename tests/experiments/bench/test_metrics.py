"""The arithmetic of the summary, held against numpy and by hand; limits; the table's lines."""

from typing import Any

import numpy as np
import pytest

from experiments.bench.metrics import is_good, parse, summarise
from experiments.bench.report import Bench, notes, reasons_of, summary_of
from experiments.bench.table import table
from experiments.framework.base import Part, PartResult


def row(index: int, **changed: Any) -> dict[str, Any]:
    """An answered request of 4 tokens: TTFT 100 ms x (index + 1), gaps of 10, 20 and 30 ms."""
    ttft = 0.1 * (index + 1)
    base: dict[str, Any] = {
        "success": True,
        "pdd_failure": "",
        "input_len": 50,
        "output_len": 4,
        "ttft": ttft,
        "tpot": 0.02,
        "itl": [0.01, 0.02, 0.03],
        "e2el": ttft + 0.06,
        "pdd_start_s": float(index),
        "pdd_end_s": index + ttft + 0.06,
        "pdd_late_ms": 1.0,
        "pdd_held_ms": 0.0,
    }
    return base | changed


def failure(index: int, reason: str) -> dict[str, Any]:
    return row(index, success=False, pdd_failure=reason, ttft=None, tpot=None, itl=[], output_len=0)


def noted(index: int, **changed: Any) -> dict[str, Any]:
    """As a pddbed gateway's record adds to it."""
    record: dict[str, Any] = {
        "pdd_pipeline": "p-rld-md",
        "pdd_rld_tokens": 1,
        "pdd_md_tokens": 3,
        "pdd_replays": 0,
        "pdd_p_hit": 0.5,
        "pdd_md_hit": 0.5,
        "pdd_delta_bytes": 1000,
        "pdd_kv_queue_ms": 2.0,
        "pdd_kv_xfer_ms": 40.0,
        "pdd_handoff_pause_ms": 30.0,
        "pdd_gateway_queue_ms": 0.1,
        "pdd_handoff_mode": "catch-up",
        "pdd_gateway_ttft": 0.1,
    }
    return row(index, **record) | changed


def facts(**changed: Any) -> dict[str, Any]:
    return {
        "duration_s": 10.0,
        "expected_hit": 0.5,
        "under_way": 0,
        "not_sent": 0,
        "why": "",
        "unrecorded": 0,
    } | changed


PARAMETERS: dict[str, Any] = {
    "model": "tiny",
    "num_prompts": 3,
    "request_rate": 1.0,
    "burstiness": 1.0,
    "max_concurrency": None,
    "goodput": {},
    "percentiles": [99.0],
    "synthetic": True,
}


def test_throughput_counts_answered_requests_over_the_whole_run() -> None:
    found = summarise([row(0), row(1), failure(2, "429 overloaded")], 10.0, {})
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, {"429 overloaded": 1})
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (100, 8)
    assert found["request_throughput"] == 0.2
    assert found["output_throughput"] == 0.8
    assert found["total_token_throughput"] == 10.8


def test_times_are_numpys_mean_median_deviation_and_percentiles() -> None:
    rows = [row(index) for index in range(7)]
    found = summarise(rows, 10.0, {}, (12.5, 99.9))
    for metric, values in {
        "ttft": [1000 * r["ttft"] for r in rows],
        "itl": [1000 * gap for r in rows for gap in r["itl"]],
        "e2el": [1000 * r["e2el"] for r in rows],
    }.items():
        assert found[f"mean_{metric}_ms"] == pytest.approx(np.mean(values))
        assert found[f"median_{metric}_ms"] == pytest.approx(np.median(values))
        assert found[f"std_{metric}_ms"] == pytest.approx(np.std(values))
        for name, q in {"p12.5": 12.5, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "p99.9": 99.9}.items():
            assert found[f"{name}_{metric}_ms"] == pytest.approx(np.percentile(values, q))


def test_nothing_answered_is_a_summary_too() -> None:
    found = summarise([failure(0, "cannot connect")], 1.0, {"ttft": 5.0})
    assert (found["completed"], found["request_goodput"]) == (0, 0)
    assert "mean_ttft_ms" not in found
    assert "Failed requests:                         1" in table(found, [99.0])
    assert summarise([], 0.0, {})["request_throughput"] == 0


def test_the_most_at_once_is_counted_over_failures_as_well() -> None:
    rows = [row(0, pdd_start_s=0.0, pdd_end_s=5.0), failure(1, "x") | {"pdd_start_s": 1.0, "pdd_end_s": 2.0}]
    rows.append(row(2, pdd_start_s=2.0, pdd_end_s=3.0))  # begins as the other ends
    assert summarise(rows, 5.0, {})["max_concurrent_requests"] == 2


def test_goodput_needs_every_limit_and_counts_of_all_requests() -> None:
    limits = parse(["ttft:200", "tpot:25", "e2el:1000"])
    assert [is_good(row(index), limits) for index in range(3)] == [True, True, False]
    found = summarise([row(0), row(1), row(2), failure(3, "x")], 10.0, limits)
    assert (found["request_goodput"], found["pdd_good_share"]) == (0.2, 0.5)
    assert is_good(row(0, tpot=None), limits), "an answer of one token has no time per further token"


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["ttft"], "'ttft' is no limit; write one of ttft:MS, tpot:MS, e2el:MS"),
        (["itl:3"], "'itl:3' is no limit"),
        (["ttft:fast"], "'ttft:fast': the limit is a number of milliseconds"),
        (["ttft:-1"], "a number of milliseconds"),
        (["ttft:nan"], "a number of milliseconds"),
        (["ttft:1", "ttft:2"], "ttft has two limits"),
    ],
)
def test_a_wrong_limit_is_told(texts: list[str], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(texts)
    assert said in str(caught.value)


def test_the_labs_figures_are_by_tokens_and_left_out_for_other_servers() -> None:
    assert not any("hit" in key or "rld" in key for key in summarise([row(0)], 1.0, {}))
    rows = [noted(0), noted(1, pdd_p_hit=1.0, input_len=150, pdd_delta_bytes=None, pdd_pipeline="p-md")]
    found = summarise(rows, 1.0, {})
    assert found["pdd_p_hit"] == (0.5 * 50 + 1.0 * 150) / 200
    assert found["pdd_rld_share"] == 0.25
    assert found["pdd_total_delta_bytes"] == found["pdd_mean_delta_bytes"] == 1000
    assert found["pdd_pipelines"] == {"p-rld-md": 1, "p-md": 1}
    assert found["p99_pdd_kv_xfer_ms"] == 40.0
    assert found["mean_pdd_client_ttft_ms"] == pytest.approx(50.0)


def test_the_table_is_vllms_line_for_line_and_fits_80_columns() -> None:
    found = summarise([noted(0), noted(1)], 10.0, parse(["ttft:150"])) | {"request_rate": 2.0, "max_concurrency": 4}
    lines = table(found, [90.0, 99.0]).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    for line in (
        "Successful requests:                     2",
        "Maximum request concurrency:             4",
        "Request rate configured (RPS):           2.00",
        "Benchmark duration (s):                  10.00",
        "Request goodput (req/s):                 0.10",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          150.00",
        "P90 TTFT (ms):                           190.00",
        "P99 TPOT (ms):                           20.00",
        "Relay's share of tokens (%):             25.00",
    ):
        assert line in lines
    assert max(map(len, lines)) <= 80
    assert lines == [line.rstrip() for line in lines]


def test_one_late_start_is_no_reason_and_two_of_a_hundred_are() -> None:
    rows = [row(index) for index in range(99)]
    once = PartResult([*rows, row(99, pdd_late_ms=60.0)], facts())
    assert summary_of(PARAMETERS, once)["pdd_late_starts"] == 1
    assert reasons_of(PARAMETERS, once) == []
    twice = PartResult([*rows[1:], row(0, pdd_late_ms=60.0), row(99, pdd_late_ms=80.0)], facts())
    (said,) = reasons_of(PARAMETERS, twice)
    assert (
        "could not keep to the schedule: 2 of 100 requests started more than 50 ms late (the latest by 80 ms)" in said
    )


def test_a_run_that_was_stopped_says_how_far_it_came() -> None:
    for why, words in {"interrupted": "interrupted after 1 of 3", "gone": "the server was gone after 1 of 3"}.items():
        part = PartResult([noted(0)], facts(why=why, under_way=1, not_sent=1))
        assert words in reasons_of(PARAMETERS, part)[0]
        assert not Bench().evaluate(PARAMETERS, {"bench": (Part("bench", 1, 1.0), part)}).summary["complete"]
        assert "Under way at the end, and not counted: 1." in notes(summary_of(PARAMETERS, part))


def test_caches_that_knew_the_prompts_make_another_load_of_a_synthetic_one_and_a_note_of_a_trace() -> None:
    part = PartResult([noted(0, pdd_p_hit=0.9)], facts(expected_hit=0.0))
    (said,) = reasons_of(PARAMETERS, part)
    assert "prefill hit 90% of the prompts' tokens where the load by itself gives 0%" in said
    of_a_trace = PARAMETERS | {"synthetic": False}
    assert reasons_of(of_a_trace, part) == []
    assert "another --seed makes other ones" in notes(summary_of(of_a_trace, part))[-1]


@pytest.mark.parametrize("synthetic", [True, False])
def test_caches_that_hit_more_than_a_point_less_than_the_load_gives_are_no_faithful_replay(synthetic: bool) -> None:
    parameters = PARAMETERS | {"synthetic": synthetic, "request_rate": 1.0 if synthetic else "trace"}
    short = PartResult([noted(0, pdd_p_hit=0.012, pdd_expected_hit=0.365)], facts(expected_hit=0.5))
    by_two_points = PartResult([noted(0, pdd_p_hit=0.345, pdd_expected_hit=0.365)], facts())
    assert bool(reasons_of(parameters, by_two_points)) is not synthetic, "what is made up is not a trace's by the point"
    (said,) = reasons_of(parameters, short)
    assert "prefill hit 1.2% of the prompts' tokens where the load by itself gives 36.5%" in said
    near = PartResult([noted(0, pdd_p_hit=0.356, pdd_expected_hit=0.365)], facts())
    assert reasons_of(parameters, near) == []
    words = "Hit rate of the trace by itself: 36.5% of the prompts' tokens; reached were 35.6%."
    assert (words in notes(summary_of(parameters, near))) is not synthetic
    lines = table(summary_of(parameters, near), [99.0]).splitlines()
    assert "Prefill hit rate, by tokens (%):         35.60" in lines
    assert "Hit rate of the load by itself (%):      36.50" in lines


def test_hits_of_another_server_are_those_of_its_usage_or_said_to_be_unknown() -> None:
    parameters = PARAMETERS | {"synthetic": False, "request_rate": "trace"}
    silent = PartResult([row(0, pdd_expected_hit=0.4)], facts(expected_hit=0.4))
    assert "40.0% of the prompts' tokens; the server does not tell its own" in notes(summary_of(parameters, silent))[-1]
    assert reasons_of(parameters, silent) == []
    telling = PartResult([row(0, pdd_expected_hit=0.4, pdd_cached_tokens=15)], facts(expected_hit=0.4))
    assert "prefill hit 30.0%" in reasons_of(parameters, telling)[0]
    assert "Prefill hit rate, by tokens (%):         30.00" in table(summary_of(parameters, telling), [99.0])


def test_answers_and_prompts_that_the_server_made_shorter_are_counted_and_no_faithful_load() -> None:
    rows = [
        row(0, pdd_counted=True, pdd_asked_tokens=4, pdd_prompt_tokens=51),
        row(1, pdd_counted=True, pdd_asked_tokens=9, pdd_prompt_tokens=50),
        row(2, pdd_counted=True, pdd_asked_tokens=4, pdd_prompt_tokens=20),
        row(3, pdd_counted=False, pdd_asked_tokens=9, pdd_prompt_tokens=None),
    ]
    part = PartResult(rows, facts())
    short, cut = reasons_of(PARAMETERS | {"ignore_eos": True}, part)
    assert short.startswith("the server ended 1 of 4 answers before the length that was asked for")
    assert cut == "the server counts fewer tokens than were sent in 1 of 4 prompts: it cut them"
    told = notes(summary_of(PARAMETERS, part))
    assert "Answers that ended before the length asked for: 1." in told, "where end tokens are not ignored"
    assert any(note.startswith("Answers whose tokens the server did not count: 1") for note in told)
    figures = {figure.key for figure in Bench().evaluate(PARAMETERS, {"bench": (Part("bench", 1, 1.0), part)}).figures}
    assert {"short_answers", "cut_prompts", "uncounted_answers"} <= figures


def test_requests_that_lost_a_worker_are_counted_and_no_faithful_run() -> None:
    losses = [{"error": "out_of_kv_blocks"}, {"error": "worker_lost"}]
    part = PartResult([noted(0, pdd_recovery=losses), noted(1, pdd_recovery=losses[:1]), noted(2)], facts())
    (said,) = reasons_of(PARAMETERS, part)
    assert said == "requests that lost a worker and went on elsewhere or again: 2 (out_of_kv_blocks: 2, worker_lost: 1)"


def test_failures_and_what_was_not_sent_are_told() -> None:
    part = PartResult([row(0), failure(1, "429 overloaded")], facts(not_sent=3, under_way=1, why="interrupted"))
    told = notes(summary_of(PARAMETERS, part))
    assert "Failed requests by reason: 429 overloaded: 1. They are in no time and no percentile." in told
    assert "Not sent: 3." in told


def test_what_became_of_a_trace_is_told_with_its_numbers() -> None:
    changed = {"not_fitting": 9813, "empty_answers": 5, "sessions_cut": 2}
    parameters = PARAMETERS | {"synthetic": False, "request_rate": "inf", "divide": 64, "changed": changed}
    parameters |= {"trace_requests": 12031, "trace_notes": ["Sorted."], "warm_up": 1, "sent_first": 16}
    part = PartResult([row(0)], facts())
    summary = summary_of(parameters, part)
    assert summary["pdd_changed"] == changed
    told = notes(summary)
    for words in (
        "Sorted.",
        "Prompts and blocks are divided by 64.",
        "The trace's times are not used: requests are sent at once.",
        "9813 of the trace's 12031 requests are left out: with their answer they do not fit the model's context.",
        "5 requests have an answer of no token in the trace, and ask for one.",
        "2 conversations lack a turn before their last one, so that later turns hit less.",
    ):
        assert words in told
    assert "Sent before, not measured:               17" in table(summary, [99.0])
    assert "The trace's times are divided by 4." in notes(summary | {"pdd_speedup": 4.0, "request_rate": "trace"})
    figures = {one.key: one.value for one in Bench().evaluate(parameters, {"bench": (Part("b", 1, 1.0), part)}).figures}
    assert figures["changed not_fitting"] == 9813


class Read(dict[str, Any]):
    """A summary that knows which of its values were read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.keys_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)


def test_the_report_has_every_figure_of_the_terminals_table() -> None:
    rows = [noted(0, pdd_expected_hit=0.5, pdd_replays=1), noted(1, pdd_expected_hit=0.5), failure(2, "x")]
    parameters = PARAMETERS | {"goodput": {"ttft": 150.0}, "warm_up": 1, "percentiles": [50.0, 99.9]}
    part = PartResult(rows, facts())
    summary = Read(summary_of(parameters, part))
    table(summary, [50.0, 99.9])
    figures = {one.key: one.value for one in Bench().evaluate(parameters, {"bench": (Part("b", 1, 1.0), part)}).figures}
    for key in summary.keys_read & summary.keys():
        value = summary[key]
        if isinstance(value, dict):
            for name, count in value.items():
                assert figures[f"{key.removeprefix('pdd_')} {name}"] == count
        elif isinstance(value, int | float) and key not in ("request_rate", "max_concurrency", "pdd_reached_hit"):
            assert figures[key.removeprefix("pdd_")] == value
    assert figures["median_pdd_kv_xfer_ms"] == 40.0
    assert figures["pipelines p-rld-md"] == figures["handoffs catch-up"] == 2


def test_a_run_of_an_older_version_is_evaluated_as_it_was() -> None:
    part = PartResult([noted(0)], facts())
    assert "changed" not in PARAMETERS
    assert reasons_of(PARAMETERS, part) == notes(summary_of(PARAMETERS, part)) == []


def test_what_a_cap_held_back_is_a_note_and_no_lateness() -> None:
    part = PartResult([noted(0, pdd_held_ms=2500.0)], facts())
    assert reasons_of(PARAMETERS, part) == []
    assert "Held back by --concurrency or --in-turn: 1, by up to 2.5 s" in notes(summary_of(PARAMETERS, part))[0]
    assert notes(summary_of(PARAMETERS | {"request_rate": "inf"}, part)) == [], "a closed loop"
