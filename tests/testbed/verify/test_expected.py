"""Intervals for delays with jitter: honest links lie inside, however few values the probes met."""

from random import Random
from statistics import fmean, pstdev

import pytest

from testbed.links.emulator.jitter import JitterProcess
from testbed.model.impairment import Impairment, Jitter
from testbed.verify.expected import Expected, probes_for, with_jitter

MS = 1_000_000


def observed(asked: Impairment, count: int, interval_ns: int, seed: int) -> tuple[float, float]:
    assert asked.jitter is not None
    process = JitterProcess(asked.jitter, Random(f"honest/{seed}"), 0)
    start = seed * 1_700_123
    delays = [max(0, asked.delay_ns + process.offset_ns(start + index * interval_ns)) for index in range(count)]
    return fmean(delays), pstdev(delays)


def inside(expected: Expected, figures: tuple[float, float]) -> bool:
    (mean, deviation), mean_ns, std_ns = figures, expected.mean_ns, expected.std_ns
    return mean_ns[0] <= mean <= mean_ns[1] and std_ns[0] <= deviation <= std_ns[1]


@pytest.mark.parametrize("distribution", ["normal", "uniform", "pareto", "paretonormal"])
@pytest.mark.parametrize(
    ("delay_ms", "std_ms", "seconds"), [(20, 1, 0.4), (20, 30, 5.0), (1000, 450, 0.4), (5, 4, 2.0)]
)
def test_honest_links_are_inside(distribution: str, delay_ms: int, std_ms: int, seconds: float) -> None:
    asked = Impairment(delay_ns=delay_ms * MS, jitter=Jitter(std_ms * MS, distribution))  # type: ignore[arg-type]
    expected = with_jitter(asked, 100, int(seconds * 1e9 / 100))
    outside = sum(not inside(expected, observed(asked, 100, int(seconds * 1e9 / 100), seed)) for seed in range(100))
    assert outside <= 1


def test_probes_within_one_value_of_the_jitter_are_one_observation() -> None:
    asked = Impairment(delay_ns=1000 * MS, jitter=Jitter(450 * MS))
    expected = with_jitter(asked, 1000, MS // 10)
    assert not expected.enough
    assert expected.values < 0.1
    assert expected.mean_ns[1] - expected.mean_ns[0] > 1000 * MS


def test_a_longer_look_tells_more() -> None:
    asked = Impairment(delay_ns=20 * MS, jitter=Jitter(MS))
    short, long = (with_jitter(asked, 200, interval) for interval in (MS, 20 * MS))
    assert long.mean_ns[1] - long.mean_ns[0] < short.mean_ns[1] - short.mean_ns[0] < 4 * MS


def test_the_mean_of_a_delay_that_cannot_be_negative_is_higher() -> None:
    expected = with_jitter(Impairment(delay_ns=5 * MS, jitter=Jitter(20 * MS)), 500, 20 * MS)
    assert expected.mean_ns[0] > 5 * MS


def test_the_full_form_meets_many_values_where_there_is_time() -> None:
    assert probes_for(Impairment(jitter=Jitter(MS)), 5_000 * MS, 30_000 * MS, 100, 1000) == (1000, 5 * MS)
    count, interval_ns = probes_for(Impairment(jitter=Jitter(100 * MS)), 5_000 * MS, 30_000 * MS, 100, 1000)
    assert count * interval_ns == 30_000 * MS
