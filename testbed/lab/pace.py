"""What paced workers say of how they keep their profiles' times: `pace-HOST.json` in the lab's records.

The workers own the file and what is in it (docs/engine.md, "Pacing"); this module reads it.
"""

import json
from pathlib import Path
from typing import Any


def read_pace(records: Path) -> dict[str, dict[str, Any]]:
    """The last word of each paced worker that has said one, by host."""
    found = {}
    for file in sorted(records.glob("pace-*.json")):
        try:
            row = json.loads(file.read_text())
            found[str(row["host"])] = row
        except (OSError, ValueError, TypeError, KeyError):
            continue  # of a worker that was killed before it could write all of it, or of somebody else
    return found


def pace_reasons(records: Path) -> list[str]:
    """Why figures that a worker's speed is in are not to be trusted."""
    return [
        f"{host}, paced as {row.get('profile')}: {reason}"
        for host, row in read_pace(records).items()
        for reason in row.get("reasons", ())
    ]


def pace_words(row: dict[str, Any]) -> str:
    """For people: `paced as gpu-a, 2 of 1,204 steps late`."""
    return f"paced as {row.get('profile')}, {row.get('late', 0):,} of {row.get('steps', 0):,} steps late"
