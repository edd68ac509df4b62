"""The simulator: nothing is lost, queues are the known ones, and what must help helps."""

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.sim.deployment import VARIANTS, Deployment
from experiments.sim.simulator import simulate
from experiments.skew.fit import waits
from experiments.traces.generate import SessionRecipe, generate_sessions
from experiments.traces.stats import hits
from experiments.traces.trace import Request, Trace

ONE = Deployment(prefill_nodes=1)
SHORT = SessionRecipe(requests=200, sessions=16, rate_per_s=0.4)
TRACE = generate_sessions(SHORT)
BLOCK = 256


def fresh(times_s: Sequence[float], tokens: Sequence[int], answer: int = 100) -> Trace:
    """Prompts of which nothing repeats."""
    made, next_id = [], 1
    for time_s, count in zip(times_s, tokens, strict=True):
        blocks = tuple(range(next_id, next_id + count // BLOCK))
        next_id += len(blocks)
        made.append(Request(round(time_s * 1e9), count, answer, blocks))
    return Trace(tuple(made), BLOCK, "test", "test")


@pytest.mark.parametrize("name", VARIANTS)
def test_every_request_is_answered_once_and_whole(name: str) -> None:
    run = simulate(TRACE, VARIANTS[name], Deployment(), SHORT.warm_up)
    assert len(run.outcomes) == SHORT.requests
    for one, request in zip(run.outcomes, TRACE.requests[SHORT.warm_up :], strict=True):
        assert (one.prompt_tokens, one.answer_tokens) == (request.input_tokens, request.output_tokens)
        assert one.arrival_s <= one.first_token_s <= one.last_token_s
        assert 0 <= one.relayed <= one.answer_tokens
        assert one.ttft_s >= one.prefill_queue_s + one.prefill_s
        assert one.kv_bytes <= one.prompt_tokens * Deployment().kv_bytes_per_token


@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_trace_gives_the_same_outcome(name: str) -> None:
    again = generate_sessions(SHORT)
    first = simulate(TRACE, VARIANTS[name], Deployment(), SHORT.warm_up)
    assert simulate(again, VARIANTS[name], Deployment(), SHORT.warm_up) == first


def test_prefill_of_one_node_is_a_first_come_queue() -> None:
    source = random.Random(1)
    times = sorted(source.uniform(0, 300) for _ in range(60))
    tokens = [source.randrange(1, 400) * BLOCK for _ in times]
    run = simulate(fresh(times, tokens), VARIANTS["idc-pd"], ONE)
    expected = waits(times, [count / ONE.prefill_tokens_per_s for count in tokens], 1)
    assert [one.prefill_queue_s for one in run.outcomes] == pytest.approx(expected, abs=1e-6)


def test_the_mean_wait_for_prefill_is_that_of_an_m_d_1_queue() -> None:
    source, now = random.Random(7), 0.0
    service, load = 9000 * 1.024 / ONE.prefill_tokens_per_s, 0.6
    times = [now := now + source.expovariate(load / service) for _ in range(10_000)]
    run = simulate(fresh(times, [9216] * len(times), answer=1), VARIANTS["idc-pd"], ONE)
    expected = load * service / (2 * (1 - load))  # Pollaczek and Khinchine
    assert fmean(one.prefill_queue_s for one in run.outcomes) == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("connections", [1, 3, 8])
def test_the_pool_is_a_first_come_queue_of_its_connections(connections: int) -> None:
    deployment = replace(ONE, connections=connections, prefill_tokens_per_s=1e12)
    source = random.Random(connections)
    times = sorted(source.uniform(0, 100) for _ in range(80))
    tokens = [source.randrange(1, 400) * BLOCK for _ in times]
    run = simulate(fresh(times, tokens), VARIANTS["cdc-pd"], deployment)
    sent = [count * deployment.kv_bytes_per_token / deployment.connection_bytes_per_s for count in tokens]
    expected = waits(times, [time_s + deployment.rtt_s for time_s in sent], connections)
    assert [one.kv_queue_s for one in run.outcomes] == pytest.approx(expected, abs=1e-6)
    assert [one.kv_xfer_s for one in run.outcomes] == pytest.approx([s + deployment.rtt_s / 2 for s in sent])


def test_hit_rates_are_those_of_the_caches_policy() -> None:
    slow = replace(TRACE, requests=tuple(replace(r, time_ns=r.time_ns * 1000) for r in TRACE.requests))
    run = simulate(slow, VARIANTS["cdc-pd"], ONE, SHORT.warm_up)
    expected = [hit.rate for hit in hits(slow)[SHORT.warm_up :]]
    assert [one.md_hit for one in run.outcomes] == pytest.approx(expected, abs=1e-4)
    assert [one.p_hit for one in run.outcomes] == pytest.approx(expected, abs=1e-4)


def test_a_relay_starts_an_answer_no_later_than_the_wan_would() -> None:
    pdd, cdc = (simulate(TRACE, VARIANTS[name], ONE, SHORT.warm_up) for name in ("pdd", "cdc-pd"))
    assert all(a.ttft_s <= b.ttft_s + 1e-9 for a, b in zip(pdd.outcomes, cdc.outcomes, strict=True))
    relayed = [(a, b) for a, b in zip(pdd.outcomes, cdc.outcomes, strict=True) if a.pipeline == "p-rld-md"]
    assert all(b.ttft_s - a.ttft_s > 0.9 * b.kv_bytes / ONE.connection_bytes_per_s for a, b in relayed)


@settings(max_examples=10, deadline=None)
@given(st.floats(5e6, 5e8), st.floats(1.1, 10))
def test_slower_connections_delay_answers_and_leave_more_to_the_relay(slow: float, times: float) -> None:
    deployments = [replace(ONE, connection_bytes_per_s=rate, connections=1000) for rate in (slow, slow * times)]
    slower, faster = (simulate(TRACE, VARIANTS["cdc-pd"], one, SHORT.warm_up) for one in deployments)
    for a, b in zip(slower.outcomes, faster.outcomes, strict=True):
        assert a.ttft_s >= b.ttft_s - 1e-9 or a.md_hit != b.md_hit
    shares = [simulate(TRACE, VARIANTS["pdd"], one, SHORT.warm_up).relay_share for one in deployments]
    assert shares[0] >= shares[1] - 0.002


def test_chunks_hide_the_transfer_behind_prefill() -> None:
    trace = fresh([0.0, 100.0], [102_400, 102_400])
    after, chunked = (simulate(trace, VARIANTS[name], ONE).outcomes[1] for name in ("cdc-pd", "cdc-pd-chunked"))
    transfer_s = 102_400 * ONE.kv_bytes_per_token / ONE.connection_bytes_per_s
    assert after.ttft_s == pytest.approx(after.prefill_s + transfer_s + ONE.rtt_s)
    first_chunk_s = ONE.chunk_tokens / ONE.prefill_tokens_per_s
    last_chunk_s = ONE.chunk_tokens * ONE.kv_bytes_per_token / ONE.connection_bytes_per_s
    expected = max(after.prefill_s + last_chunk_s, first_chunk_s + transfer_s) + ONE.rtt_s
    assert chunked.ttft_s == pytest.approx(expected)


def test_what_ends_on_the_relay_and_is_dropped_breeds_misses() -> None:
    recipe = SessionRecipe(requests=800, rate_per_s=0.4)
    trace = generate_sessions(recipe)
    kept, dropped = (
        simulate(trace, VARIANTS[name], Deployment(), recipe.warm_up) for name in ("pdd", "pdd-end-on-rld")
    )

    def behind(outcomes: Sequence[object]) -> float:
        return fmean(one.p_hit - (one.md_hit or 0.0) for one in outcomes)  # type: ignore[attr-defined]

    assert abs(behind(kept.outcomes)) < 0.01
    assert behind(dropped.outcomes) > 0.02
    assert dropped.relay_share > kept.relay_share


def test_a_bounded_cache_hits_less() -> None:
    bounded = replace(ONE, cache_tokens=500_000)
    full, small = (simulate(TRACE, VARIANTS["cdc-pd"], one, SHORT.warm_up) for one in (ONE, bounded))
    assert fmean(one.p_hit for one in small.outcomes) < fmean(one.p_hit for one in full.outcomes)


def test_a_short_uncached_prompt_stays_with_main_decode_in_prfaas() -> None:
    trace = fresh([0.0, 100.0], [BLOCK, 102_400])
    short, long = simulate(trace, VARIANTS["prfaas"], ONE).outcomes
    assert (short.pipeline, short.kv_bytes) == ("md", 0)
    assert short.ttft_s == pytest.approx(ONE.rtt_s + BLOCK / ONE.main_prefill_tokens_per_s)
    assert long.pipeline == "p-md"
    assert long.kv_bytes > 0


@pytest.mark.parametrize("nodes", [1, 3])
def test_identical_prompts_at_once_are_computed_once(nodes: int) -> None:
    path = tuple(range(1, 13))
    trace = Trace(tuple(Request(0, 12 * BLOCK, 10, path) for _ in range(8)), BLOCK, "test", "test")
    run = simulate(trace, VARIANTS["cdc-pd"], replace(ONE, prefill_nodes=nodes))
    tokens = 12 * BLOCK
    assert sorted(one.p_hit for one in run.outcomes) == [0.0] + [(tokens - 1) / tokens] * 7
    assert len({one.prefill for one in run.outcomes}) == 1


def test_a_prompt_finds_what_was_computed_while_it_waited() -> None:
    paths = [(1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 9), (1, 2, 3, 4, 6)]
    requests = tuple(Request(n, len(path) * BLOCK, 10, path) for n, path in enumerate(paths))
    run = simulate(Trace(requests, BLOCK, "test", "test"), VARIANTS["idc-pd"], ONE)
    found = [round(one.p_hit * one.prompt_tokens / BLOCK) for one in run.outcomes]
    assert found == [0, 3, 2, 4]
