"""What is asked and when: synthetic loads, traces made shorter, arrivals, and that the bodies are those prompts."""

import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.bench.client import Bodies, asked
from experiments.bench.load import LoadError, altered, check_fits, divided, kept, left_out, with_output
from experiments.bench.options import Asked, at_rate, of_trace
from experiments.bench.synthetic import Synthetic
from experiments.traces.generate import Recipe, generate
from experiments.traces.hit_rates import DISTRIBUTIONS
from experiments.traces.prompts import PromptMaker
from experiments.traces.stats import hits
from experiments.traces.trace import Request, Trace

BYTES = range(32, 127)


def trace_of(*requests: Request, block_tokens: int = 4) -> Trace:
    return Trace(tuple(requests), block_tokens, "mooncake", "t.jsonl")


def weighted_hit(trace: Trace, first: int) -> float:
    found = hits(trace)[first:]
    return sum(hit.cached_tokens for hit in found) / sum(hit.request.input_tokens for hit in found)


def test_the_last_of_a_poisson_load_leaves_when_the_rate_says_and_gaps_are_exponential() -> None:
    times = at_rate(4000, 8.0, 1.0, seed=1)
    assert times[-1] == 500_000_000_000
    assert times == sorted(times)
    gaps = [b - a for a, b in pairwise([0, *times])]
    spread = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert 0.95 < spread < 1.05  # of an exponential distribution: 1


@pytest.mark.parametrize(("burstiness", "expected"), [(0.25, 2.0), (4.0, 0.5)])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float, expected: float) -> None:
    gaps = [b - a for a, b in pairwise([0, *at_rate(4000, 1.0, burstiness, seed=3)])]
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(expected, rel=0.1)


def test_arrivals_are_the_same_for_a_seed_and_others_for_another() -> None:
    assert at_rate(50, 2.0, 1.0, seed=1) == at_rate(50, 2.0, 1.0, seed=1) != at_rate(50, 2.0, 1.0, seed=2)


def test_a_traces_times_count_from_its_first_request_and_speed_up() -> None:
    requests = [Request(at, 8, 1) for at in (4_000_000_000, 5_000_000_000, 9_000_000_000)]
    assert of_trace(requests, 2.0) == [0, 500_000_000, 2_500_000_000]


def test_synthetic_prompts_share_nothing_unless_asked() -> None:
    load = Synthetic(num=20, input_tokens=70, output_tokens=9)
    trace = load.trace()
    assert load.warm_up == 0
    assert {(r.input_tokens, r.output_tokens) for r in trace.requests} == {(70, 9)}
    assert weighted_hit(trace, 0) == 0


def test_the_shared_prefix_is_there_before_the_first_measured_prompt() -> None:
    load = Synthetic(num=10, input_tokens=128, output_tokens=4, prefix_share=0.75)
    trace = load.trace()
    assert load.warm_up == 1
    assert len(trace.requests) == 11
    assert [hit.rate for hit in hits(trace)[1:]] == [0.75] * 10


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_distribution_hits_as_it_does_in_trace_make(name: str) -> None:
    load = Synthetic(num=64, input_tokens=512, output_tokens=4, distribution=name, sessions=4)
    made = generate(Recipe(name, requests=64, sessions=4, prompt_tokens=512, seed=1))
    assert [r.blocks for r in load.trace().requests] == [r.blocks for r in made.requests]
    assert weighted_hit(load.trace(), load.warm_up) == pytest.approx(1 - DISTRIBUTIONS[name].mean, abs=0.03)


def test_dividing_keeps_hit_rates_and_answers() -> None:
    trace = generate(Recipe("skewed", requests=48, sessions=3, prompt_tokens=4096, block_tokens=64))
    small = divided(trace, 16)
    assert small.block_tokens == 4
    assert {r.input_tokens for r in small.requests} == {256}
    assert [r.output_tokens for r in small.requests] == [r.output_tokens for r in trace.requests]
    for before, after in zip(hits(trace), hits(small), strict=True):
        assert after.rate == pytest.approx(before.rate, abs=1 / 256)


def test_blocks_that_cannot_be_divided_are_refused_with_what_can() -> None:
    with pytest.raises(LoadError, match=r"blocks of 12 tokens cannot be divided by 5; .* 2, 3, 4, 6, 12$"):
        divided(trace_of(Request(0, 24, 1, (1, 2)), block_tokens=12), 5)


def test_what_does_not_fit_is_counted_before_it_is_sent_and_each_way_out_works() -> None:
    trace = trace_of(
        Request(0, 8, 4, (1, 2)), Request(1, 60, 4, tuple(range(15))), Request(2, 200, 5, tuple(range(50, 100)))
    )
    check_fits(trace, 205, trace)
    with pytest.raises(LoadError) as caught:
        check_fits(kept(trace, None, 2), 63, trace)
    said = str(caught.value)
    assert "1 of 2 requests (t.jsonl) do not fit the model's context of 63 tokens" in said
    assert "the longest: 60 of prompt and 4 of answer" in said
    assert "--max-input 8 keeps the 1 that fit; or --divide 4 makes" in said
    check_fits(kept(trace, 8, 2), 63, trace)
    check_fits(divided(trace, 4), 63, trace)


def test_one_short_prompt_with_a_long_answer_does_not_decide_how_much_is_kept() -> None:
    trace = trace_of(Request(0, 4, 60), *(Request(at, 8 * at, 4) for at in range(1, 8)), block_tokens=1)
    with pytest.raises(LoadError, match=r"--only-fitting keeps the 6 that fit") as caught:
        check_fits(trace, 54, trace)
    assert "2 of 8 requests" in str(caught.value)
    taken = kept(trace, None, None, 54)
    check_fits(taken, 54, trace)
    assert left_out(trace, taken.requests, None, None, 54) == {"not_fitting": 2}
    with pytest.raises(LoadError, match=r"no request of t\.jsonl fits the model's context of 5 tokens"):
        kept(trace, None, None, 5)


def test_what_fits_is_not_guessed_where_the_server_does_not_say_its_context(tmp_path: Path) -> None:
    trace = trace_of(Request(0, 8, 0, (1, 2)), Request(1, 80, 9, tuple(range(20))))
    asked_for = Asked(source=tmp_path / "t.jsonl", only_fitting=True)
    with pytest.raises(LoadError, match="does not say its model's context"):
        asked_for.load(trace, None)
    load = asked_for.load(trace, 50)
    assert (len(load.trace.requests), load.changed) == (1, {"not_fitting": 1, "empty_answers": 1})


def test_a_shared_prefix_that_had_to_be_rounded_is_told() -> None:
    load = Asked(input_len=100, prefix_share=0.5, block_tokens=16)
    assert load.rounding == ["--prefix-share 50.0% is 48.0% here: prompts share whole blocks (--block-tokens)."]
    assert Asked(input_len=96, prefix_share=0.5, block_tokens=16).rounding == []


def test_what_is_left_out_and_altered_is_counted() -> None:
    turns = [Request(at, 10 * (at + 1), at % 2, session=at % 2, turn=at // 2) for at in range(6)]
    trace = trace_of(*turns)
    long = kept(trace, 30, 2)
    assert left_out(trace, long.requests, 30, 2) == {"too_long": 3, "beyond_num": 1}
    assert left_out(trace, long.requests, 30, 5)["too_few"] == 3
    without_middle = [turns[0], turns[1], turns[3], turns[4]]
    assert left_out(trace, without_middle, None, None)["sessions_cut"] == 1, "of session 0 the middle turn is not taken"
    assert altered(turns, 1, None) == {"empty_answers": 3}
    assert altered(turns, 25, 1) == {"other_answers": 3, "divided_away": 2}


def test_where_dividing_is_not_enough_both_options_are_told_and_work() -> None:
    trace = trace_of(Request(0, 40, 4), Request(1, 200, 4), Request(2, 3000, 4))
    with pytest.raises(LoadError) as caught:
        check_fits(trace, 60, trace)
    assert "--max-input 40 keeps the 1 that fit; or --divide 4 --max-input 50 keeps 2" in str(caught.value)
    check_fits(kept(divided(trace, 4), 50, None), 60, trace)


def test_a_trace_that_is_divided_already_is_divided_by_more() -> None:
    trace = divided(trace_of(Request(0, 400, 4), Request(1, 90, 4), block_tokens=16), 2)
    with pytest.raises(LoadError, match="--divide 4 makes"):
        check_fits(trace, 110, trace, divided_by=2)


def test_long_answers_are_told_of_output_len() -> None:
    trace = trace_of(Request(0, 8, 90), block_tokens=1)
    with pytest.raises(LoadError, match="--output-len N gives every answer N tokens"):
        check_fits(trace, 64, trace)
    check_fits(with_output(trace, 50), 64, trace)


def test_a_synthetic_load_that_does_not_fit_is_told_its_own_options() -> None:
    with pytest.raises(LoadError, match="shorten --input-len or --output-len"):
        check_fits(Synthetic(num=3, input_tokens=100, output_tokens=9).trace(), 108, None)


def test_of_what_is_kept_the_first_are_taken() -> None:
    trace = trace_of(*(Request(at, tokens, 1) for at, tokens in enumerate([9, 3, 8, 2, 1])))
    assert [r.input_tokens for r in kept(trace, 5, 2).requests] == [3, 2]
    with pytest.raises(LoadError, match=r"no prompt of t\.jsonl has at most 0 tokens"):
        kept(trace, 0, None)


def test_an_answer_has_at_least_one_token() -> None:
    assert with_output(trace_of(Request(0, 8, 0)), None).requests[0].output_tokens == 1


@given(
    st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.integers(0, 3)), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(0, 9),
)
def test_bodies_hold_the_prompts_of_the_trace_token_by_token(
    shapes: list[tuple[int, bool, int]], block_tokens: int, seed: int
) -> None:
    requests = []
    for at, (tokens, whole_last, chain) in enumerate(shapes):
        count = tokens // block_tokens + (whole_last and tokens % block_tokens > 0)
        requests.append(Request(at, tokens, at + 1, tuple(range(100 * chain, 100 * chain + count))))
    trace = trace_of(*requests, block_tokens=block_tokens)
    bodies = Bodies(trace, BYTES, seed, asked("m", ignore_eos=True))
    maker = PromptMaker(trace, BYTES, seed=seed)
    for request in trace.requests:
        body = json.loads(bodies.body(request))
        assert body.pop("prompt") == maker.prompt(request)
        assert body == {
            "model": "m",
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "max_tokens": request.output_tokens,
        }


def test_requests_of_one_moment_share_no_more_than_their_ids_say() -> None:
    trace = trace_of(Request(0, 10, 1, (1, 2)), Request(0, 10, 1, (1, 2)), Request(0, 3, 1), Request(0, 3, 1))
    bodies = Bodies(trace, BYTES, 1, asked("m", ignore_eos=True))
    one, other, short, shorter = (json.loads(bodies.body(request))["prompt"] for request in trace.requests)
    assert one[:8] == other[:8]
    assert one[8:] != other[8:]
    assert short != shorter
    assert [hit.cached_tokens for hit in hits(trace)] == [0, 8, 0, 0]


def test_other_servers_are_not_told_of_ignore_eos_unless_asked() -> None:
    assert "ignore_eos" not in asked("m", ignore_eos=False)
