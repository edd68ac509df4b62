"""A first-come queue in front of a pool of connections, as arithmetic: what a run is predicted to do. Pure."""

import heapq
from collections.abc import Sequence


def waits(arrivals: Sequence[float], holds: Sequence[float], servers: int) -> list[float]:
    """How long each arrival waits for a free server that it then holds for its time. Any one unit of time."""
    free = [0.0] * servers
    waited = []
    for arrival, hold in zip(arrivals, holds, strict=True):
        start = max(arrival, heapq.heappop(free))
        waited.append(start - arrival)
        heapq.heappush(free, start + hold)
    return waited


def even_arrivals(count: int, spacing: float) -> list[float]:
    return [index * spacing for index in range(count)]
