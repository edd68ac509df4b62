"""How paced workers kept their profiles' times during a part, and the figure that tells it. Whether a lab can be
trusted by it is `testbed.lab.pace`'s.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.framework.experiment import Part, PartResult
from experiments.framework.figures import Figure
from testbed.lab.pace import MOST_LATE, read_pace

_COUNTS = ("steps", "late", "overran", "paced_ns", "lateness_ns")


class PaceSince:
    """The workers' counts from now on. `records`: the lab's results directory."""

    def __init__(self, records: Path) -> None:
        self._records = records
        self._before = read_pace(records)

    def facts(self) -> dict[str, dict[str, Any]]:
        """For part.json, by host."""
        return {host: _since(row, self._before.get(host, {})) for host, row in read_pace(self._records).items()}


def _since(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {name: now.get(name, 0) - before.get(name, 0) for name in _COUNTS}


def late_steps_figure(results: Mapping[str, tuple[Part, PartResult]], judged: bool) -> Figure:
    """Of all steps of all parts, each of which has `facts` as "pace"."""
    counts = [row for _, result in results.values() for row in result.facts["pace"].values()]
    steps = sum(row["steps"] for row in counts)
    late = (sum(row["late"] for row in counts) / steps,) if steps else ()
    low, high = (0.0, MOST_LATE) if judged else (None, None)
    note = f"{steps:,} steps"
    return Figure("late_steps", "paced steps that were late", "share", late, "check", 0.0, low, high, note=note)
