"""Figures of an honest link with jitter, from a finite number of probes: intervals of the delay's mean and deviation.

The drivers' jitter keeps a value for ten standard deviations of time, so probes within that time are one observation,
however many they are. The intervals are those of the drivers' own process, sampled as the probes sample it.
"""

from dataclasses import dataclass
from random import Random
from statistics import fmean, pstdev, stdev

from testbed.links.emulator.jitter import JitterProcess, period_ns
from testbed.model.impairment import Impairment

OBSERVATIONS = 300
DEVIATIONS = 4.5  # of the observations' own spread: one honest figure of 100,000 lies outside, were they normal
LEAST_OF_SMALLEST = 0.7  # of the smallest deviation observed
FEWEST_VALUES = 4  # of the jitter, below which nothing can be said of its mean


@dataclass(frozen=True, slots=True)
class Expected:
    """Intervals in ns; `values`: how many values of the jitter the probes meet."""

    mean_ns: tuple[float, float]
    std_ns: tuple[float, float]
    values: float

    @property
    def enough(self) -> bool:
        return self.values >= FEWEST_VALUES


def with_jitter(asked: Impairment, count: int, interval_ns: int) -> Expected:
    """Intervals of `count` probes, one each `interval_ns`, on a link with jitter that does what it is asked to do."""
    assert asked.jitter is not None
    random = Random(1)
    process = JitterProcess(asked.jitter, random, 0)
    lasts, pause = count * interval_ns, 5 * period_ns(asked.jitter)
    means, deviations = [], []
    for number in range(OBSERVATIONS):
        # Probes may be in step with the jitter's values: in which phase is left to chance.
        begin = number * (lasts + pause) + random.randrange(period_ns(asked.jitter))
        delays = [max(0, asked.delay_ns + process.offset_ns(begin + index * interval_ns)) for index in range(count)]
        means.append(fmean(delays))
        deviations.append(pstdev(delays))
    # Few values of a skewed distribution often lie close together, so deviations are far from normal below.
    std_ns = (LEAST_OF_SMALLEST * min(deviations), _interval(deviations)[1])
    return Expected(_interval(means), std_ns, lasts / period_ns(asked.jitter))


def probes_for(asked: Impairment, shortest_ns: int, longest_ns: int, values: int, most: int) -> tuple[int, int]:
    """Count and interval of probes that meet `values` values of the jitter within the limits of time."""
    assert asked.jitter is not None
    lasts = min(longest_ns, max(shortest_ns, values * period_ns(asked.jitter)))
    count = max(2, min(most, lasts // 1_000_000))
    return count, lasts // count


def _interval(observed: list[float]) -> tuple[float, float]:
    centre, spread = fmean(observed), DEVIATIONS * stdev(observed)
    return max(0.0, min(centre - spread, *observed)), max(centre + spread, *observed)
