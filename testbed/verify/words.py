"""Verified figures as people read them: base units to short text."""

import math
from collections.abc import Mapping
from typing import Any

from testbed.model.units import short_duration, short_percent, short_rate, short_size

UNTOLD = ("duplicates", "corruption", "reordering", "lateness", "lateness (verify)")


def shown(value: float | None, unit: str) -> str:
    """A base-unit value for people; `-` for what was not measured, `none` for the delay of what never arrived."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "none"
    match unit:
        case "ns":  # a delay less its floor may come out a few microseconds below nothing
            return ("-" if value < 0 else "") + short_duration(abs(value), 4)
        case "bit/s":
            return short_rate(value, 4)
        case "share":
            return short_percent(value)
        case _:
            return short_size(value)


def phrase(figure: Mapping[str, Any]) -> str | None:
    """Measured value in two or three words: `20.01ms`, `399.7mbit (UDP)`, `loss 1.02%`; None for nothing, and for
    what nobody asked for and is not there."""
    if figure["measured"] is None or (figure["figure"] in UNTOLD and not figure["asked"] and figure["ok"]):
        return None
    value = shown(figure["measured"], figure["unit"])
    name = figure["figure"]
    if name == "delay":
        return value
    if name.startswith("rate"):
        return f"{value} {name.removeprefix('rate').strip()}".strip()
    return f"{name} {value}"
