"""The shapes of jitter as tables of quantiles, standardised: mean 0, standard deviation 1.

Both drivers draw from these tables, so that a name means one thing. Shapes as in iproute2's netem/*.c:
pareto with alpha = 3, paretonormal as a quarter normal and three quarters pareto, tails cut at 4 deviations.
"""

from collections.abc import Callable
from functools import cache
from statistics import NormalDist, fmean

from testbed.model.impairment import Distribution

_CUT = 4.0
_PARETO_MEAN, _PARETO_STD = 1.5, 0.75**0.5


@cache
def quantiles(distribution: Distribution, count: int = 4096) -> tuple[float, ...]:
    """`count` equally likely values in rising order, less than 6 away from 0; mean 0 and deviation 1 exactly."""
    quantile = _QUANTILES[distribution]
    values = [min(_CUT, max(-_CUT, quantile((i + 0.5) / count))) for i in range(count)]
    mean = fmean(values)
    deviation = fmean((value - mean) ** 2 for value in values) ** 0.5
    return tuple((value - mean) / deviation for value in values)


def _uniform(u: float) -> float:
    return u - 0.5


def _normal(u: float) -> float:
    return NormalDist().inv_cdf(u)


def _pareto(u: float) -> float:
    return ((1.0 - u) ** (-1 / 3) - _PARETO_MEAN) / _PARETO_STD


def _paretonormal(u: float) -> float:
    return 0.25 * _normal(u) + 0.75 * _pareto(u)


_QUANTILES: dict[Distribution, Callable[[float], float]] = {
    "uniform": _uniform,
    "normal": _normal,
    "pareto": _pareto,
    "paretonormal": _paretonormal,
}
