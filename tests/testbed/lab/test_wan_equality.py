"""`benchmarks/wan_equality.py` in its short form: loss, delay and an outage in the middle change no token."""

from dataclasses import replace

import pytest

from benchmarks.wan_equality import FAR, run, verdict
from workers.models import ModelSpec, load_model

pytestmark = pytest.mark.root

SHORT = replace(
    FAR,
    delay="300ms",
    rate="50mbit",
    outage="1s",
    prompts=(1, 60),
    answers=(100, 250),
    relay_cpu="10%",
    at_once=5,
    requests=10,
)


def test_every_answer_across_a_bad_wan_is_the_controls_and_nothing_is_held_afterwards() -> None:
    found = run(SHORT, load_model(ModelSpec("tiny")), "equality-short")
    assert verdict(SHORT, found) == []
