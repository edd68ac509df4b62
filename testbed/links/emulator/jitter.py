"""Jitter as a process over time: it varies the delay without ever reordering, and without raising its mean.

Independent jitter per packet would reorder; keeping order by waiting then lets every late packet hold up its
followers (netem at 1,200 packets/s, 50 +- 10 ms: mean 67.9 ms). So the offset is a plateau for ten standard
deviations of time, drawn from the distribution, and a ramp to the next plateau that is never steeper than
the time itself. Pure: time is passed in.
"""

from random import Random

from testbed.links.distributions import quantiles
from testbed.model.impairment import Jitter

_PERIOD_DEVIATIONS = 10
# Each block of 16 plateaus takes one value from each sixteenth of the distribution, in random order: a run of
# seconds already has the mean and the spread that were asked for.
_STRATA = 16


def period_ns(jitter: Jitter) -> int:
    """Time that one value of the delay lasts."""
    return _PERIOD_DEVIATIONS * jitter.std_ns


class JitterProcess:
    """`offset_ns(t)` for rising `t`; the plateaus' distribution is exact, ramps are centred on their borders."""

    def __init__(self, jitter: Jitter, random: Random, start: int) -> None:
        self._random = random
        self._values = [round(value * jitter.std_ns) for value in quantiles(jitter.distribution)]
        self._strata: list[int] = []
        self._period = period_ns(jitter)
        self._start = start
        self._before, self._here, self._after = self._draw(), self._draw(), self._draw()

    def offset_ns(self, t: int) -> int:
        """Addition to the delay of a packet that enters the wire at `t`; may be negative."""
        elapsed = t - self._start
        if elapsed >= self._period:
            elapsed = self._move_on(elapsed)
        to_end = self._period - elapsed
        if elapsed < to_end:
            return _ramp(self._here, self._before, elapsed, self._period)
        return _ramp(self._here, self._after, to_end, self._period)

    def _move_on(self, elapsed: int) -> int:
        periods, elapsed = divmod(elapsed, self._period)
        self._start += periods * self._period
        for _ in range(min(periods, 3)):  # after a pause three fresh plateaus are as good as a thousand
            self._before, self._here, self._after = self._here, self._after, self._draw()
        return elapsed

    def _draw(self) -> int:
        if not self._strata:
            self._strata = self._random.sample(range(_STRATA), _STRATA)
        width = len(self._values) // _STRATA
        return self._values[self._strata.pop() * width + self._random.randrange(width)]


def _ramp(here: int, neighbour: int, distance: int, period: int) -> int:
    """The offset at `distance` from the border between two plateaus, where it is half-way between them."""
    half = neighbour - here
    reach = min(abs(half), period // 2)  # slope 1/2 where there is room for it, never above 1
    if distance >= reach:
        return here
    return here + half * (reach - distance) // (2 * reach)
