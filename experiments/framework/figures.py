"""A published figure beside what was measured: target, value, interval over seeds, verdict, label. Pure.

Labels: *configured* follows from a setting; *fitted*: a free parameter was chosen to hit it; *predicted*:
nothing was chosen to hit it; *check*: not published, the run's own book-keeping.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

Label = Literal["configured", "fitted", "predicted", "check"]

# Student's t, two-sided 95 %, by degrees of freedom; beyond, the normal distribution's is near enough
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_Z_95 = 1.96


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of a report. `values` has one value a seed; `low` and `high` bound what counts as met (None: not judged).

    `fit` says which parameter was chosen, where the label is *fitted*.
    """

    key: str
    text: str
    unit: str
    values: tuple[float, ...]
    label: Label
    target: float | None = None
    low: float | None = None
    high: float | None = None
    fit: str = ""
    note: str = ""

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Self:
        """The inverse of `row`. Raises KeyError, TypeError, ValueError."""
        names = ("key", "unit", "label", "target", "low", "high", "fit", "note")
        known = {name: row[name] for name in names if name in row}
        return cls(text=str(row["figure"]), values=tuple(float(value) for value in row["values"]), **known)

    @property
    def value(self) -> float | None:
        return sum(self.values) / len(self.values) if self.values else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean over seeds; None of fewer than two."""
        return interval_95(self.values)

    @property
    def verdict(self) -> str:
        """met, missed, or reported where nothing is judged."""
        value = self.value
        if value is None or self.low is None or self.high is None:
            return "reported"
        return "met" if self.low <= value <= self.high else "missed"

    def row(self) -> dict[str, Any]:
        """As summary.json has it."""
        return {
            "key": self.key,
            "figure": self.text,
            "unit": self.unit,
            "target": self.target,
            "low": self.low,
            "high": self.high,
            "measured": self.value,
            "interval_95": self.interval,
            "values": list(self.values),
            "verdict": self.verdict,
            "label": self.label,
            "fit": self.fit,
            "note": self.note,
        }


def within(
    key: str, text: str, unit: str, values: Sequence[float], target: float, tolerance: float, label: Label, **words: str
) -> Figure:
    """Met within a relative tolerance of the target."""
    slack = abs(target) * tolerance
    note = words.pop("note", "") or f"within {tolerance:.0%}"
    return Figure(key, text, unit, tuple(values), label, target, target - slack, target + slack, note=note, **words)


def interval_95(values: Sequence[float]) -> tuple[float, float] | None:
    count = len(values)
    if count < 2:
        return None
    mean = sum(values) / count
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    half = (_T_95[count - 2] if count - 2 < len(_T_95) else _Z_95) * deviation / math.sqrt(count)
    return mean - half, mean + half


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the nearest ranks, as numpy and vllm's bench do. `values` must not be empty."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
