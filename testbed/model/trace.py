"""A recorded trace as it is played: from each start on, these values. Bounded in memory, however long the recording.

Owns the value and its form in JSON; knows no file format.
"""

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from testbed.model.impairment import BernoulliLoss

MAX_CHANGES = 200_000  # of one trace: an hour of changes every 18 ms, and 5 MB of memory
# Less than a rate of nothing cannot be asked of a bottleneck: its queue would be dropped, not held. One packet in 12 s.
LEAST_RATE_BPS = 1000

COLUMNS = {"rate_bps": "q", "delay_ns": "q", "loss": "d"}  # an Impairment's fields; loss is a probability


@dataclass(frozen=True, slots=True)
class Trace:
    """`starts_ns` ascends from 0; every column has one value for each; the whole lasts `period_ns`."""

    name: str  # the file, as it was named
    kind: str  # mahimahi | csv
    sha256: str  # of the file
    period_ns: int
    starts_ns: "array[int]"
    columns: Mapping[str, "array[Any]"]
    granularity_ns: int = 0  # the rate is averaged over this; 0: played as recorded

    def __post_init__(self) -> None:
        if not self.starts_ns or self.starts_ns[0] != 0 or self.starts_ns[-1] >= self.period_ns:
            raise ValueError(f"trace {self.name}: starts from 0 to below {self.period_ns} ns are needed")
        if not self.columns or any(len(column) != len(self.starts_ns) for column in self.columns.values()):
            raise ValueError(f"trace {self.name}: every column needs {len(self.starts_ns)} values")

    def __len__(self) -> int:
        return len(self.starts_ns)

    def values(self, index: int) -> tuple[tuple[str, Any], ...]:
        """The values that hold from the start with that index on, as an Impairment's fields."""
        row = ((name, column[index]) for name, column in self.columns.items())
        return tuple((name, _loss(value) if name == "loss" else value) for name, value in row)

    def played(self, duration_ns: int) -> Iterator[tuple[int, int]]:
        """(time, index) of every change within a duration, beginning again after each period."""
        for beginning in range(0, duration_ns, self.period_ns):
            for index, start in enumerate(self.starts_ns):
                if beginning + start >= duration_ns:
                    return
                yield beginning + start, index

    def floored(self, least_bps: int) -> "Trace":
        """The trace with no rate below `least_bps`, for a driver that cannot hold a rate of nearly nothing.

        What is thereby delivered too early is taken from the rates that follow, so that the bytes stay the trace's.
        """
        rates = self.columns.get("rate_bps")
        if rates is None or min(rates) >= least_bps:
            return self
        spans = [end - start for start, end in zip(self.starts_ns, [*self.starts_ns[1:], self.period_ns], strict=True)]
        floored, ahead = array("q"), 0  # bits x 1e9
        for rate, span in zip(rates, spans, strict=True):
            wanted = rate
            if rate < least_bps and (self.kind == "mahimahi" or rate == LEAST_RATE_BPS):
                wanted = least_bps
            elif ahead > 0:
                wanted = max(least_bps, rate - ahead // span)
            ahead = max(0, ahead + (wanted - rate) * span)
            floored.append(wanted)
        return replace(self, columns={**self.columns, "rate_bps": floored})

    @property
    def mean_rate_bps(self) -> int | None:
        """Over one period; None for a trace without rates."""
        rates = self.columns.get("rate_bps")
        if rates is None:
            return None
        ends = [*self.starts_ns[1:], self.period_ns]
        spans = zip(rates, self.starts_ns, ends, strict=True)
        return sum(rate * (end - start) for rate, start, end in spans) // self.period_ns

    def summary(self) -> dict[str, Any]:
        """Everything but the values themselves."""
        return {
            "name": self.name,
            "kind": self.kind,
            "sha256": self.sha256,
            "period_ns": self.period_ns,
            "granularity_ns": self.granularity_ns,
            "changes": len(self),
            "mean_rate_bps": self.mean_rate_bps,
            "columns": list(self.columns),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` reads them back."""
        return {
            **self.summary(),
            "starts_ns": list(self.starts_ns),
            "columns": {name: list(column) for name, column in self.columns.items()},
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Trace":
        """The inverse of `to_dict`. Raises KeyError, TypeError or ValueError."""
        return cls(
            name=plain["name"],
            kind=plain["kind"],
            sha256=plain["sha256"],
            period_ns=plain["period_ns"],
            starts_ns=array("q", plain["starts_ns"]),
            columns={name: array(COLUMNS[name], column) for name, column in plain["columns"].items()},
            granularity_ns=plain["granularity_ns"],
        )


def _loss(probability: float) -> BernoulliLoss | None:
    return BernoulliLoss(probability) if probability else None
