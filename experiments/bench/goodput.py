"""Which answers are good enough: `ttft:10000 tpot:50`, in ms, as `vllm bench serve --goodput` has it. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

METRICS = ("ttft", "tpot", "e2el")


def parse(texts: Iterable[str]) -> dict[str, float]:
    """Limits in ms by metric. Raises ValueError with what is wrong."""
    limits: dict[str, float] = {}
    for text in texts:
        metric, colon, number = text.partition(":")
        if not colon or metric not in METRICS:
            raise ValueError(f"{text!r} is no limit; write one of {', '.join(f'{name}:MS' for name in METRICS)}")
        try:
            limit = float(number)
        except ValueError:
            limit = -1.0
        if not 0 <= limit < float("inf"):
            raise ValueError(f"{text!r}: the limit is a number of milliseconds, such as {metric}:500")
        if metric in limits:
            raise ValueError(f"{metric} has two limits, {limits[metric]:g} and {number}")
        limits[metric] = limit
    return limits


def is_good(row: Mapping[str, Any], limits: Mapping[str, float]) -> bool:
    """Whether an answered request keeps all limits. An answer of one token has no tpot, and keeps that limit."""
    return all((row[metric] or 0.0) * 1000 <= limit for metric, limit in limits.items())
