"""The scale model keeps every time and every ratio of times, and refuses scales that move hit rates."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.traces import read_trace
from experiments.traces.generate import Recipe, generate
from experiments.traces.scale import Deployment, Groups, Lab, Scale, ScaleError, check_trace, scaled_trace, share_moved

REAL = Deployment(
    kv_bytes_per_token=4400,
    prefill_tokens_per_s=9000,
    decode_step_ns=30_000_000,
    wan_rate_bps=5e9,
    rtt_ns=60_000_000,
    block_tokens=64,
)
TINY_BYTES = 2048
TRACE = Path(__file__).resolve().parents[3] / "shared" / "traces" / "agentic-coding-a.jsonl.gz"


@given(
    st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    st.integers(1, 20),
    st.floats(1, 30),
    st.floats(100, 1e6),
    st.floats(0.1, 9),
)
def test_every_ratio_of_times_is_the_deployments(
    prompt_scale: int, output_scale: int, compression: float, kv_bytes: float, per_s: float
) -> None:
    lab = Scale(prompt_scale, output_scale, compression).lab(REAL, kv_bytes)
    real = Groups.of(REAL, 6400, 200, per_s)
    here = Groups.of(lab, 6400 / prompt_scale, 200 / output_scale, per_s * compression)
    for name in Groups.__slots__:
        assert math.isclose(getattr(real, name), getattr(here, name), rel_tol=1e-6), name


@given(st.sampled_from([1, 4, 16, 64]), st.floats(1, 30))
def test_every_time_is_the_deployments_divided_by_the_compression(prompt_scale: int, compression: float) -> None:
    lab = Scale(prompt_scale, 1, compression).lab(REAL, TINY_BYTES)
    tokens = 12_800
    real_s = tokens * REAL.kv_bytes_per_token * 8 / REAL.wan_rate_bps
    here_s = lab.prompt_tokens(tokens) * TINY_BYTES * 8 / lab.wan_rate_bps
    assert math.isclose(real_s, here_s * compression)
    real_s = tokens / REAL.prefill_tokens_per_s
    assert math.isclose(real_s, lab.prompt_tokens(tokens) / lab.prefill_tokens_per_s * compression)
    assert math.isclose(lab.rtt_ns * compression, REAL.rtt_ns, rel_tol=1e-6)
    assert abs(lab.arrival_ns(10**9) * compression - 10**9) <= compression


def test_a_scale_that_does_not_divide_the_blocks_is_refused() -> None:
    with pytest.raises(ScaleError, match="cache blocks of 64 tokens cannot be divided by prompt_scale 48"):
        Scale(48).lab(REAL, TINY_BYTES)
    with pytest.raises(ScaleError, match=r"time_compression is 0\.5"):
        Scale(64, time_compression=0.5)


@pytest.mark.parametrize("prompt_scale", [1, 4, 64])
def test_blocks_divided_as_prompts_are_keep_every_hit(prompt_scale: int) -> None:
    trace = generate(Recipe(requests=160, sessions=8, prompt_tokens=16_384, block_tokens=64))
    lab = Scale(prompt_scale).lab(REAL, TINY_BYTES)
    assert scaled_trace(trace, lab).block_tokens == 64 // prompt_scale
    assert share_moved(trace, lab) == 0
    check_trace(trace, lab)


def _with_blocks(lab: Lab, block_tokens: int) -> Lab:
    return replace(lab, block_tokens=block_tokens)


def test_blocks_that_stay_large_move_hits_and_are_refused() -> None:
    trace = generate(Recipe(requests=320, sessions=8, prompt_tokens=16_384, block_tokens=64))
    lab = _with_blocks(Scale(64).lab(REAL, TINY_BYTES), 16)
    with pytest.raises(ScaleError, match="moves the share of requests above 95 % hit by -"):
        check_trace(trace, lab)


@pytest.mark.skipif(not TRACE.exists(), reason="the real agentic trace is not beside the project")
def test_on_the_real_trace_only_blocks_that_are_divided_keep_the_share() -> None:
    trace = read_trace(TRACE)
    trace = replace(trace, requests=trace.requests[:800])
    lab = Scale(64).lab(REAL, TINY_BYTES)
    check_trace(trace, lab)
    assert share_moved(trace, _with_blocks(lab, 16)) < -0.01
