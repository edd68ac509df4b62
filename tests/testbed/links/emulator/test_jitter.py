"""Jitter keeps order and the mean; its shapes are what their names say. Fixed seeds, time is a number."""

from itertools import pairwise
from random import Random
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.links.distributions import quantiles
from testbed.links.emulator.jitter import JitterProcess
from testbed.model.impairment import DISTRIBUTIONS, Distribution, Jitter

MS = 1_000_000
S = 1_000 * MS


def offsets_ms(jitter: Jitter, seconds: float, step_ns: int = 833_333, seed: int = 1) -> list[float]:
    process = JitterProcess(jitter, Random(seed), 0)
    return [process.offset_ns(t) / MS for t in range(0, int(seconds * S), step_ns)]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_mean_and_deviation_are_those_of_the_file(distribution: Distribution) -> None:
    offsets = offsets_ms(Jitter(10 * MS, distribution), 60)
    assert abs(fmean(offsets)) < 0.4  # of 50 ms: under 1 %
    assert pstdev(offsets) == pytest.approx(10, rel=0.10)  # ramps between plateaus take 4 % or so


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("gap_ns", [1_000, 833_333, 7 * MS])
def test_no_packet_ever_overtakes(distribution: Distribution, gap_ns: int) -> None:
    process = JitterProcess(Jitter(10 * MS, distribution), Random(2), 0)
    departures = [t + process.offset_ns(t) for t in range(0, 20_000 * gap_ns, gap_ns)]
    assert all(later >= earlier - 1 for earlier, later in pairwise(departures))  # 1 ns of rounding


@given(st.lists(st.integers(0, 400 * MS), min_size=2, max_size=200), st.integers(0, 1000))
def test_pauses_of_any_length_are_allowed(gaps: list[int], seed: int) -> None:
    process = JitterProcess(Jitter(3 * MS), Random(seed), 0)
    t = 0
    departures = []
    for gap in gaps:
        t += gap
        offset = process.offset_ns(t)
        assert abs(offset) <= 18 * MS
        departures.append(t + offset)
    assert all(later >= earlier - 1 for earlier, later in pairwise(departures))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_tables_are_standardised_and_bounded(distribution: Distribution) -> None:
    table = quantiles(distribution)
    assert fmean(table) == pytest.approx(0, abs=1e-9)
    assert pstdev(table) == pytest.approx(1)
    assert list(table) == sorted(table)
    assert max(map(abs, table)) < 6  # Impairment.longest_delay_ns counts on it


def test_shapes_differ_as_their_names_say() -> None:
    tables = {name: quantiles(name) for name in DISTRIBUTIONS}
    assert tables["uniform"][-1] == pytest.approx(3**0.5, abs=0.01)
    assert tables["normal"][3481] == pytest.approx(1.036, abs=0.02)  # 85 %
    assert tables["pareto"][0] > -0.76  # nothing far below the mean
    assert tables["pareto"][-1] > 4  # a long tail above it
    assert tables["pareto"][0] > tables["paretonormal"][0] > tables["normal"][0]
