"""Checks of a part: workers' byte counts against a packet capture, and how paced workers kept their times."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.framework.base import ExperimentError, Part, PartResult
from experiments.framework.figures import Figure
from testbed.capture.audit import TOTAL, audit
from testbed.capture.context import Context
from testbed.capture.counters import BadCounters
from testbed.capture.packets import UnreadableCapture
from testbed.capture.pcapng import read_comment
from testbed.verify.pace import MOST_LATE, read_pace

TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class BytesCheck:
    """TCP payload bytes by direction, each byte once; `difference` is the largest, relative to the counters."""

    captured: dict[str, int]
    counted: dict[str, int]
    by_class: dict[str, dict[str, int]]  # class -> direction -> bytes in the file, where the payload was captured
    difference: float
    packets: int
    dropped: int | None  # packets that the capture lost; their bytes are known by sequence numbers
    problems: tuple[str, ...]

    @property
    def reasons(self) -> list[str]:
        """Reasons why the part is not faithful, as far as bytes tell."""
        if self.difference <= TOLERANCE:
            return list(self.problems)
        return [*self.problems, f"capture and counters differ by {self.difference:.1%}"]

    def facts(self) -> dict[str, Any]:
        """For part.json."""
        return {
            "captured_bytes": self.captured,
            "counted_bytes": self.counted,
            "bytes_by_class": self.by_class,
            "bytes_difference": self.difference,
            "captured_packets": self.packets,
            "capture_dropped": self.dropped,
        }


def check_bytes(capture: Path, records: Path) -> BytesCheck:
    """The check of a capture, which is removed. Raises ExperimentError when either cannot be read."""
    try:
        context = Context.from_comment(read_comment(capture))
        if context is None:
            raise ExperimentError(f"{capture} does not say which lab it is of")
        result = audit(capture, context, records)
    except (UnreadableCapture, BadCounters) as error:
        raise ExperimentError(str(error)) from None
    capture.unlink()
    totals = [row for row in result.rows if row.traffic == TOTAL and row.counted]
    differences = [abs(row.difference) for row in totals if row.difference is not None]
    problems = list(result.problems)
    if not totals:
        problems.append("no worker counted any byte while packets were captured")
    by_class: dict[str, dict[str, int]] = {}
    for row in result.rows:
        if row.traffic != TOTAL and row.in_file:
            by_class.setdefault(row.traffic, {})[row.direction] = row.in_file
    return BytesCheck(
        captured={row.direction: row.captured or 0 for row in totals},
        counted={row.direction: row.counted or 0 for row in totals},
        by_class=by_class,
        difference=max(differences, default=0.0),
        packets=result.facts.packets,
        dropped=result.dropped,
        problems=tuple(problems),
    )


def bytes_figure(results: Mapping[str, tuple[Part, PartResult]]) -> Figure:
    """The worst of all parts, each of which has a check's `facts`."""
    facts = [result.facts for _, result in results.values()]
    worst = tuple(sorted(one["bytes_difference"] for one in facts)[-1:])
    size = sum(sum(one["captured_bytes"].values()) for one in facts)
    text = "capture against the workers' byte counts, largest difference"
    note = f"{size:,} bytes of TCP payload"
    return Figure("bytes_difference", text, "share", worst, "check", 0.0, 0.0, TOLERANCE, note=note)


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
    """Share of late steps in all parts, each of which has `facts` as "pace"."""
    counts = [row for _, result in results.values() for row in result.facts["pace"].values()]
    steps = sum(row["steps"] for row in counts)
    late = (sum(row["late"] for row in counts) / steps,) if steps else ()
    low, high = (0.0, MOST_LATE) if judged else (None, None)
    note = f"{steps:,} steps"
    return Figure("late_steps", "paced steps that were late", "share", late, "check", 0.0, low, high, note=note)
