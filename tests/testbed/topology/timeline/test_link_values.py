"""A change names some values and keeps the rest; `wan set` and timelines read and apply it the same way."""

from typing import Any

import pytest

from testbed.lab.wan import ChangeError, read_change
from testbed.model.direction import DIRECTIONS
from testbed.model.impairment import BernoulliLoss, CoDel, Impairment, Jitter
from testbed.model.timeline import Change
from testbed.topology.schema import Step
from testbed.topology.timeline.link_values import apply_change, change_of
from tests.testbed.topology.timeline.timelines import MBIT, MS

BEFORE = Impairment(
    rate_bps=100 * MBIT, delay_ns=20 * MS, queue_bytes=500_000, jitter=Jitter(MS), loss=BernoulliLoss(0.01)
)
NO_RATE = Impairment(delay_ns=20 * MS)


def after(values: dict[str, Any], before: Impairment = BEFORE, directions: Any = DIRECTIONS) -> dict[str, Impairment]:
    return apply_change(dict.fromkeys(DIRECTIONS, before), directions, read_change(values), 1500)  # type: ignore[return-value]


def test_what_is_not_named_is_kept() -> None:
    changed = after({"delay": "300ms"})["forward"]
    assert changed == Impairment(
        rate_bps=100 * MBIT, delay_ns=300 * MS, queue_bytes=500_000, jitter=Jitter(MS), loss=BernoulliLoss(0.01)
    )


def test_one_direction_leaves_the_other_alone() -> None:
    changed = after({"rate": "1mbit"}, directions=["backward"])
    assert changed["forward"] == BEFORE
    assert changed["backward"].rate_bps == MBIT


def test_a_value_is_taken_away_by_zero_or_by_none() -> None:
    for values in ({"loss": "0%", "jitter": {"std": "0ms"}}, {"loss": "none", "jitter": "none"}):
        changed = after(values)["forward"]
        assert changed.loss is None
        assert changed.jitter is None
        assert changed.delay_ns == 20 * MS


def test_the_queue_keeps_its_bytes_unless_it_is_named() -> None:
    assert after({"rate": "1gbit", "delay": "1s"})["forward"].queue_bytes == 500_000
    assert after({"rate": "8mbit", "delay": "500ms", "queue": {"bdp": 2}})["forward"].queue_bytes == 2_000_000
    assert after({"queue": {"bytes": "1MiB"}})["forward"].queue_bytes == 2**20
    assert after({"queue": "none"})["forward"].queue_bytes == 500_000, "the default: 1 BDP of 100 Mbit/s x 40 ms"


def test_a_first_rate_brings_the_default_queue_and_the_last_one_takes_it_away() -> None:
    limited = after({"rate": "80mbit"}, NO_RATE)["forward"]
    assert (limited.rate_bps, limited.queue_bytes) == (80 * MBIT, 400_000)
    assert after({"rate": "none"})["forward"].queue_bytes is None
    with pytest.raises(ValueError, match="a link without a rate has no queue"):
        after({"queue": {"bytes": "1MiB"}}, NO_RATE)


def test_codel_is_kept_and_can_be_switched() -> None:
    on = after({"queue": {"codel": "true"}})["forward"]
    assert (on.codel, on.queue_bytes) == (CoDel(), 500_000)
    assert after({"rate": "1mbit"}, on)["forward"].codel == CoDel()
    assert after({"queue": {"bytes": "1MiB"}}, on)["forward"].codel == CoDel()
    assert after({"queue": {"codel": "false"}}, on)["forward"].codel is None


def test_a_step_and_wan_set_mean_the_same() -> None:
    values = {"rate": "1mbit", "delay": "5ms", "loss": "1%", "duplicate": "2%", "queue": {"bytes": "64KiB"}}
    assert change_of(Step.model_validate({"at": "0s", **values})) == read_change(values)
    assert change_of(Step.model_validate({"at": "0s", "rate": "none"})) == read_change({"rate": "none"})


def test_what_cannot_be_changed_is_refused() -> None:
    with pytest.raises(ChangeError, match="cannot change mtu; one can change: rate, delay"):
        read_change({"mtu": "1500"})
    with pytest.raises(ChangeError, match='"10" has no unit'):
        read_change({"rate": "10"})
    with pytest.raises(ChangeError, match="never change"):
        read_change({"loss": {"good_to_bad": "0%", "bad_to_good": "0%"}})


def test_a_change_that_names_nothing_changes_nothing() -> None:
    assert apply_change({"forward": BEFORE, "backward": NO_RATE}, DIRECTIONS, Change(()), 1500) == {
        "forward": BEFORE,
        "backward": NO_RATE,
    }
