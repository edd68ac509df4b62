"""The lateness histogram: every value lands in a bucket that contains it, quantiles are conservative."""

from hypothesis import given
from hypothesis import strategies as st

from testbed.links.emulator.histogram import Histogram


@given(st.lists(st.integers(0, 2**55), min_size=1))
def test_a_quantile_is_never_below_the_value_and_at_most_an_eighth_above(values: list[int]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    values.sort()
    for q in (0.5, 0.99, 1.0):
        exact = next(v for rank, v in enumerate(values, 1) if rank >= q * len(values))
        assert exact <= histogram.quantile_ns(q) <= exact + exact // 8 + 1


def test_an_empty_histogram_and_negative_values_are_zero() -> None:
    histogram = Histogram()
    assert histogram.summary()["p99_ns"] == 0
    histogram.add(-5)
    assert histogram.summary()["count"] == 1
    assert histogram.quantile_ns(1.0) == 0


@given(st.lists(st.integers(0, 2**40), max_size=50))
def test_buckets_sum_to_the_count(values: list[int]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    assert sum(count for _, count in histogram.summary()["buckets"]) == len(values)
