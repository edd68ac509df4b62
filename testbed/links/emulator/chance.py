"""Choice of the passing MTU segments that are hit: lost, duplicated, corrupted, or made to overtake.

Owns the random processes. Each is a stream of gaps (how many segments pass before the next hit), so that a
segment that is not hit costs nothing; decisions depend on the seed and the count of segments alone.
"""

from collections.abc import Iterator, Sequence
from math import log, log1p
from random import Random

from testbed.model.impairment import BernoulliLoss, GilbertElliottLoss, Loss

NEVER = 1 << 62


class Hits:
    """Consumes a stream of gaps as segments pass."""

    __slots__ = ("_ahead", "_gaps")

    def __init__(self, gaps: Iterator[int]) -> None:
        self._gaps = gaps
        self._ahead = next(gaps)

    def among(self, count: int) -> Sequence[int]:
        """`count` segments pass: the indices of those that are hit, rising."""
        at = self._ahead
        if at >= count:
            self._ahead = at - count
            return ()
        hits = []
        while at < count:
            hits.append(at)
            at += 1 + next(self._gaps)
        self._ahead = at - count
        return hits


def bernoulli_gaps(probability: float, random: Random) -> Iterator[int]:
    """Every segment is hit with `probability`, independently."""
    while True:
        yield _geometric(probability, random)


def gilbert_elliott_gaps(model: GilbertElliottLoss, random: Random) -> Iterator[int]:
    """Hits of the two-state model, which starts in the good state, as netem does."""
    if model.loss_bad == model.loss_good == 0:
        while True:
            yield NEVER
    gap = 0
    while True:
        for leave, loss in ((model.good_to_bad, model.loss_good), (model.bad_to_good, model.loss_bad)):
            stay = 1 + _geometric(leave, random)  # segments that see this state
            while (clean := _geometric(loss, random)) < stay:
                yield gap + clean
                gap = 0
                stay -= clean + 1
            gap += stay


def loss_gaps(loss: Loss | None, random: Random) -> Iterator[int]:
    match loss:
        case None:
            return bernoulli_gaps(0.0, random)
        case BernoulliLoss(probability):
            return bernoulli_gaps(probability, random)
        case GilbertElliottLoss():
            return gilbert_elliott_gaps(loss, random)


def _geometric(probability: float, random: Random) -> int:
    """Failures before the first success."""
    if probability <= 0.0:
        return NEVER
    if probability >= 1.0:
        return 0
    return int(min(NEVER, log(1.0 - random.random()) / log1p(-probability)))
