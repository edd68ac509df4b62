"""Reports of paced workers on keeping their profiles' times (`pace-HOST.json` in the lab's records), and whether a
lab's figures can be trusted by that. The workers own the files and their counts: docs/engine.md, "Pacing".
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testbed.model.units import told_apart

MOST_LATE = 0.01  # of all paced steps of a lab
MOST_LATENESS = 0.005  # of their time
MOST_OVERRUN = 0.05  # of one worker's own steps, which may be a hundred, the first and slowest among them

Row = Mapping[str, Any]


def read_pace(records: Path) -> dict[str, dict[str, Any]]:
    """The last word of each paced worker that has said one, by host."""
    found = {}
    for file in sorted(records.glob("pace-*.json")):
        try:
            row = json.loads(file.read_text())
            found[str(row["host"])] = row
        except (OSError, ValueError, TypeError, KeyError):
            continue  # of somebody else
    return found


def pace_reasons(rows: Mapping[str, Row]) -> list[str]:
    """Reasons why figures that the workers' speed is in are not to be trusted; a single late step alone is no reason.

    The lab's steps count together, as the figures do. A worker that is too slow for its profile does not hide behind
    others.
    """
    reasons = []
    steps, late, paced_ns, lateness_ns = (
        sum(row[key] for row in rows.values()) for key in ("steps", "late", "paced_ns", "lateness_ns")
    )
    if late > max(1, MOST_LATE * steps):
        worst = max(rows, key=lambda host: rows[host]["late"])
        reasons.append(
            f"{late:,} of {steps:,} paced steps were late (limit {MOST_LATE:.0%}), most of them on {worst} "
            f"({rows[worst]['late']:,} of {rows[worst]['steps']:,})"
        )
    if late > 1 and lateness_ns > MOST_LATENESS * paced_ns:
        share, limit = told_apart(lateness_ns / paced_ns, MOST_LATENESS)
        reasons.append(f"paced steps were late by {share} of their time in all (limit {limit})")
    for host, row in rows.items():
        if row["overran"] > max(1, MOST_OVERRUN * row["steps"]):
            reasons.append(
                f"{host} computed {row['overran']:,} of {row['steps']:,} steps in more than the time of "
                f"{row['profile']} (limit {MOST_OVERRUN:.0%}): this machine is too slow, or too busy"
            )
    return reasons


def pace_words(row: Row) -> str:
    """For people: `paced as gpu-a, 2 of 1,204 steps late`."""
    return f"paced as {row['profile']}, {row['late']:,} of {row['steps']:,} steps late"
