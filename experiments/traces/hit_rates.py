"""Distributions of the miss rate (1 - hit rate) and seeded, stratified draws from them. Pure.

A distribution is a quantile function: knots (share of requests, miss rate), joined by straight lines. `skewed` is what
agentic traffic looks like (75 % of requests above 95 % hit, median miss 2.4 %), `uniform` spreads hit rates evenly from
0 to 100 %, `mean-matched` is a uniform one with the mean of `skewed`: it keeps the bytes and takes the skew away.
`ninety` is as skewed as `skewed`, with a mean miss of 10 %.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

STRATUM = 16  # each group of so many consecutive requests holds one of each sixteenth of the distribution


@dataclass(frozen=True, slots=True)
class MissRates:
    """A named distribution of miss rates."""

    name: str
    knots: tuple[tuple[float, float], ...]

    def at(self, share: float) -> float:
        """The miss rate that `share` of all requests stay below."""
        for (before, low), (after, high) in zip(self.knots, self.knots[1:], strict=False):
            if share <= after:
                return low + (high - low) * (share - before) / (after - before)
        return self.knots[-1][1]

    @property
    def mean(self) -> float:
        pairs = zip(self.knots, self.knots[1:], strict=False)
        return sum((after - before) * (low + high) / 2 for (before, low), (after, high) in pairs)

    @property
    def median(self) -> float:
        return self.at(0.5)


SKEWED = MissRates("skewed", ((0.0, 0.004), (0.5, 0.024), (0.75, 0.05), (0.9, 0.30), (1.0, 1.0)))
UNIFORM = MissRates("uniform", ((0.0, 0.0), (1.0, 1.0)))
MEAN_MATCHED = MissRates("mean-matched", ((0.0, 0.0), (1.0, 2 * SKEWED.mean)))
BIMODAL = MissRates("bimodal", ((0.0, 0.0), (0.6, 0.05), (0.6001, 0.70), (1.0, 0.95)))
NINETY = MissRates("ninety", ((0.0, 0.004), (0.5, 0.024), (0.75, 0.05), (0.9, 0.25), (1.0, 0.975)))
DISTRIBUTIONS = {rates.name: rates for rates in (SKEWED, UNIFORM, MEAN_MATCHED, BIMODAL, NINETY)}


def draw(rates: MissRates, count: int, seed: int) -> list[float]:
    """Miss rates of `count` requests: in each group of 16 one from each sixteenth of the distribution, shuffled.

    Stratifying keeps the mean of every stretch of requests the same, so that a queue near its capacity tells the
    distribution and not the draw.
    """
    source = random.Random(f"{rates.name} {seed}")
    drawn: list[float] = []
    while len(drawn) < count:
        shares = [(index + source.random()) / STRATUM for index in range(STRATUM)]
        source.shuffle(shares)
        drawn += [rates.at(share) for share in shares]
    return drawn[:count]


def share_above(misses: Sequence[float], hit: float) -> float:
    """The share of requests whose hit rate is above `hit`."""
    return sum(miss < 1 - hit for miss in misses) / len(misses)
