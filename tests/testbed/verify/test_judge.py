"""Verdicts are pure: intervals contain what they must, and a figure outside its tolerance fails."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.model.impairment import Impairment
from testbed.verify.judge import (
    bootstrap_interval,
    judge_delay,
    judge_loss,
    judge_queue,
    judge_rate,
    wilson_interval,
)
from testbed.verify.measure import Probes, has_gaps, spacing_rate_bps
from testbed.verify.stamps import Arrival

MS = 1_000_000


@pytest.mark.parametrize(
    ("asked_ms", "measured_ms", "ok"),
    [(20, 20.1, True), (20, 20.49, True), (20, 20.51, False), (20, 19.4, False), (2000, 2020, True), (0, 0.29, True)],
)
def test_delay_is_judged_above_the_floor_within_a_third_of_a_millisecond_and_a_percent(
    asked_ms: float, measured_ms: float, ok: bool
) -> None:
    floor_ns = 0.7 * MS
    assert judge_delay(int(asked_ms * MS), measured_ms * MS + floor_ns, floor_ns).ok is ok


def test_rate_is_judged_within_two_percent_and_only_where_it_was_asked() -> None:
    assert judge_rate("rate", 100e6, 98.5e6).ok
    assert not judge_rate("rate", 100e6, 97.5e6).ok
    assert not judge_rate("rate", 100e6, 103e6).ok
    unlimited = judge_rate("rate", None, 9e9)
    assert not unlimited.judged
    assert unlimited.ok


def test_a_figure_that_was_not_measured_is_not_judged() -> None:
    assert not judge_rate("rate", 100e6, None).judged
    assert not judge_queue(1000, None, 1500).judged


@given(hits=st.integers(0, 500), extra=st.integers(1, 5000))
def test_the_score_interval_contains_the_measured_share(hits: int, extra: int) -> None:
    low, high = wilson_interval(hits, hits + extra)
    assert 0 <= low <= hits / (hits + extra) <= high <= 1


def test_a_loss_of_nothing_fails_when_anything_is_lost() -> None:
    lost = [False] * 20_000
    assert judge_loss(0.0, lost, bursty=False).ok
    lost[7] = True
    assert not judge_loss(0.0, lost, bursty=False).ok


def test_the_interval_misses_the_truth_about_as_often_as_it_says() -> None:
    generator = random.Random(1)
    asked, count, rounds = 0.01, 5000, 400
    misses = sum(
        not judge_loss(asked, [generator.random() < asked for _ in range(count)], bursty=False).ok
        for _ in range(rounds)
    )
    assert misses <= 12  # 4 expected at 99 %; more than 12 has a probability below 0.1 %


def test_bursty_loss_gets_a_wider_interval_than_independent_loss_of_the_same_share() -> None:
    generator = random.Random(2)
    bursts: list[bool] = []
    while len(bursts) < 40_000:
        bursts += [False] * generator.randrange(1800) + [True] * generator.randrange(200)
    low, high = bootstrap_interval(bursts, seed=3)
    plain_low, plain_high = wilson_interval(sum(bursts), len(bursts))
    assert high - low > 3 * (plain_high - plain_low)


def test_queue_is_judged_within_a_tenth_and_two_packets() -> None:
    assert judge_queue(1_000_000, 1_090_000, 1500).ok
    assert not judge_queue(1_000_000, 1_120_000, 1500).ok
    assert judge_queue(3000, 6200, 1500).ok


def test_the_spacing_of_a_train_gives_the_rate_however_its_head_was_sent() -> None:
    bunched = [Arrival(number, 0, 10 * MS) for number in range(50)]
    spaced = [Arrival(50 + number, 0, 20 * MS + number * 120_000) for number in range(50)]
    assert spacing_rate_bps(bunched + spaced, 1500) == pytest.approx(100e6)
    assert spacing_rate_bps([], 1500) is None
    assert spacing_rate_bps(bunched, 1500) is None


def test_packets_that_a_busy_machine_made_late_do_not_move_the_rate() -> None:
    """A tenth late by up to 5 ms, among them the last ones; nothing is ever early."""
    generator = random.Random(4)
    late = [generator.randrange(5 * MS) if number % 10 == 0 or number > 590 else 0 for number in range(600)]
    train = [Arrival(number, 0, number * 30_000 + late[number]) for number in range(600)]
    assert spacing_rate_bps(train, 1500) == pytest.approx(400e6, rel=0.001)
    slower = [Arrival(number, 0, number * 32_000 + late[number]) for number in range(600)]
    assert spacing_rate_bps(slower, 1500) == pytest.approx(375e6, rel=0.001)


def test_packets_that_overtake_as_asked_do_not_move_the_rate() -> None:
    generator = random.Random(5)
    early = [10 * MS if generator.random() < 0.1 else 0 for _ in range(600)]
    train = [Arrival(number, 0, 20 * MS + number * 30_000 - early[number]) for number in range(600)]
    assert spacing_rate_bps(train, 1500, overtaking=True) == pytest.approx(400e6, rel=0.01)


def train(spacing_ns: int, gap_ns: int = 0) -> Probes:
    """600 packets sent at once but for a pause before the 400th, each served after those before it."""
    arrivals, free = [], 0
    for number in range(600):
        sent = gap_ns if number >= 400 else 0
        free = max(free, sent) + spacing_ns
        arrivals.append(Arrival(number, sent, free + 20 * MS))
    return Probes(600, tuple(arrivals))


def test_a_sender_that_paused_is_no_slow_link_and_a_slow_link_is_no_pause() -> None:
    asked = Impairment(rate_bps=400_000_000, queue_bytes=2_000_000)
    assert not has_gaps(train(30_000), asked, 1500)
    assert has_gaps(train(30_000, gap_ns=25 * MS), asked, 1500)
    assert not has_gaps(train(600_000), asked, 1500), "20 Mbit/s"
    assert not has_gaps(train(32_000), asked, 1500), "375 Mbit/s"
    assert not has_gaps(train(15_000), asked, 1500), "faster than asked is judged, paused or not"
