"""Hand-over as times: pauses within the bounds that the live modes promise."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.sim.deployment import Deployment
from experiments.sim.handover import Relay, hand_over

IS = Deployment()


def pause_s(mode: str, asked_s: float, relay: Relay, deployment: Deployment) -> float | None:
    handed = hand_over(mode, asked_s, relay, deployment)
    if handed.first_s is None:
        return None
    return handed.first_s + deployment.rtt_s / 2 - relay.emitted_at(handed.relayed)


@given(st.floats(0, 20), st.floats(0.01, 0.1), st.floats(0.0, 1.0))
def test_catching_up_pauses_for_a_round_trip_and_two_steps_at_most(asked_s: float, itl_s: float, rtt_s: float) -> None:
    deployment = replace(IS, rtt_s=rtt_s, relay_itl_s=itl_s)
    pause = pause_s("catch-up", asked_s, Relay(0.0, 5000, itl_s), deployment)
    assert pause is not None
    assert 0 <= pause <= rtt_s + 2 * itl_s + 1e-6


@given(st.floats(0, 20), st.floats(0.01, 0.1), st.floats(0.0, 1.0))
def test_one_shot_pauses_for_a_round_trip_and_the_extend(asked_s: float, itl_s: float, rtt_s: float) -> None:
    deployment, relay = replace(IS, rtt_s=rtt_s, relay_itl_s=itl_s), Relay(0.0, 5000, itl_s)
    handed = hand_over("one-shot", asked_s, relay, deployment)
    pause = pause_s("one-shot", asked_s, relay, deployment)
    extend_s = deployment.main_itl_s + handed.relayed / deployment.main_prefill_tokens_per_s
    assert pause == pytest.approx(rtt_s + extend_s, abs=1e-6)
    assert asked_s <= handed.free_s <= asked_s + itl_s + 1e-6, "the step in flight is finished, no other begins"


@given(st.floats(0, 20), st.sampled_from(["one-shot", "catch-up"]), st.integers(1, 400))
def test_a_relay_makes_no_token_too_many(asked_s: float, mode: str, tokens: int) -> None:
    handed = hand_over(mode, asked_s, Relay(0.0, tokens, 0.075), IS)
    assert 1 <= handed.relayed <= tokens
    assert (handed.first_s is None) == (handed.relayed == tokens)


def test_one_shot_frees_the_relay_sooner() -> None:
    relay = Relay(0.0, 1000, 0.075)
    assert hand_over("one-shot", 5.0, relay, IS).free_s < hand_over("catch-up", 5.0, relay, IS).free_s
