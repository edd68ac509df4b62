"""Counters and histograms as Prometheus has them. Pure."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

Labels = dict[str, str]
Sample = tuple[str, Labels, float]

# vLLM's buckets, so that its dashboards fit; from a millisecond on, since `tiny` is that fast
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)


class Histogram:
    """Observations in buckets of fixed upper bounds."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self) -> Iterator[Sample]:
        """(name suffix, labels, value), cumulative as the exposition format wants them."""
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield "_bucket", {"le": bound}, total
        yield "_sum", {}, self._sum
        yield "_count", {}, total


class Counter:
    """Counts by one label."""

    def __init__(self, label: str, known: Sequence[str] = ()) -> None:
        self._label = label
        self._counts: dict[str, float] = dict.fromkeys(known, 0)

    def add(self, value: str, count: float = 1) -> None:
        self._counts[value] = self._counts.get(value, 0) + count

    def samples(self) -> Iterator[Sample]:
        for value, count in self._counts.items():
            yield "", {self._label: value}, count
