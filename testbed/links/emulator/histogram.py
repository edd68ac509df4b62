"""A histogram of durations whose buckets widen with the value: cheap to fill, 12 % wide, never full. No I/O."""

from typing import Any

_SUB = 8  # buckets an octave
_SUB_BITS = 3


class Histogram:
    """Durations in ns. Values below 8 ns share the first buckets exactly; negative ones count as zero."""

    __slots__ = ("_counts", "count", "max_ns", "total_ns")

    def __init__(self) -> None:
        self._counts = [0] * (64 * _SUB)
        self.count = 0
        self.total_ns = 0
        self.max_ns = 0

    def add(self, value_ns: int) -> None:
        if value_ns < _SUB:
            value_ns = max(0, value_ns)
            self._counts[value_ns] += 1
        else:
            octave = value_ns.bit_length() - 1 - _SUB_BITS
            self._counts[(octave << _SUB_BITS) + (value_ns >> octave)] += 1
        self.count += 1
        self.total_ns += value_ns
        if value_ns > self.max_ns:
            self.max_ns = value_ns

    def quantile_ns(self, q: float) -> int:
        """Upper edge of the bucket in which the q-quantile lies, capped at the maximum; 0 when empty."""
        rank = q * self.count
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if count and seen >= rank:
                return min(_upper_edge_ns(index), self.max_ns)
        return 0

    def summary(self) -> dict[str, Any]:
        """count, mean, p50, p99 and max in ns, and the non-empty buckets as [upper edge in ns, count]."""
        return {
            "count": self.count,
            "mean_ns": self.total_ns // self.count if self.count else 0,
            "p50_ns": self.quantile_ns(0.50),
            "p99_ns": self.quantile_ns(0.99),
            "max_ns": self.max_ns,
            "buckets": [[_upper_edge_ns(i), n] for i, n in enumerate(self._counts) if n],
        }


def _upper_edge_ns(index: int) -> int:
    """The largest value that falls into bucket `index`."""
    if index < 2 * _SUB:
        return index
    octave = (index >> _SUB_BITS) - 1
    return ((_SUB + (index & (_SUB - 1)) + 1) << octave) - 1
