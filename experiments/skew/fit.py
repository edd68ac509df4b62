"""The fitted parameters of `skew`, and what follows from them. `fit.json` says how they were found.

Three free parameters for three published figures: the round trip (a transfer that misses nothing), a connection's
bandwidth (the time of a whole prompt), and the arrivals' spacing. The first also stands in topologies/skew.yaml.
"""

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from experiments.traces.hit_rates import SKEWED, UNIFORM, MissRates, draw

FIT_FILE = Path(__file__).parent / "fit.json"
TOPOLOGY = Path(__file__).resolve().parents[2] / "topologies" / "skew.yaml"
TARGET_SKEWED_MS, TARGET_UNIFORM_MS, TARGET_QUEUEING_MS = 248.0, 1210.0, 1682.0
CONNECTIONS = 8
TRANSFERS = 512
FIT_SEEDS = range(101, 117)  # the load is fitted on draws that no run uses


@dataclass(frozen=True, slots=True)
class Fit:
    """`base_ms` and `whole_ms` as they were measured with this round trip and bandwidth: a transfer that misses a
    share m takes base + m x whole. `spacing_ms` is from one arrival to the next."""

    rtt_ms: float
    whole_configured_ms: float
    base_ms: float
    whole_ms: float
    spacing_ms: float
    how: str

    @classmethod
    def read(cls, file: Path = FIT_FILE) -> Self:
        return cls(**json.loads(file.read_text()))

    def connection_bps(self, prompt_bytes: int) -> int:
        """The bandwidth of one connection, payload bits a second, with which a whole prompt takes its time."""
        return round(prompt_bytes * 8 / (self.whole_configured_ms / 1000))

    def hold_ms(self, miss: float) -> float:
        return self.base_ms + miss * self.whole_ms

    @property
    def capacity_per_s(self) -> float:
        """Capacity of the pool, with uniform hit rates."""
        return CONNECTIONS / (self.hold_ms(UNIFORM.mean) / 1000)

    @property
    def load(self) -> float:
        """Arrivals over the uniform row's capacity."""
        return 1000 / self.spacing_ms / self.capacity_per_s

    def predict_waits_ms(self, rates: MissRates, count: int, seed: int, spacing_ms: float | None = None) -> list[float]:
        """The queue that these parameters come to."""
        holds = [self.hold_ms(miss) for miss in draw(rates, count, seed)]
        return waits(even_arrivals(count, spacing_ms or self.spacing_ms), holds, CONNECTIONS)


def waits(arrivals: Sequence[float], holds: Sequence[float], servers: int) -> list[float]:
    """Time that each arrival waits for a free server that it then holds for its time. Any one unit of time."""
    free = [0.0] * servers
    waited = []
    for arrival, hold in zip(arrivals, holds, strict=True):
        start = max(arrival, heapq.heappop(free))
        waited.append(start - arrival)
        heapq.heappush(free, start + hold)
    return waited


def even_arrivals(count: int, spacing: float) -> list[float]:
    return [index * spacing for index in range(count)]


def solve_base_and_whole() -> tuple[float, float]:
    """(base, whole) in ms for which the median misses of both rows take the published times."""
    whole_ms = (TARGET_UNIFORM_MS - TARGET_SKEWED_MS) / (UNIFORM.median - SKEWED.median)
    return TARGET_UNIFORM_MS - UNIFORM.median * whole_ms, whole_ms


def solve_spacing_ms(base_ms: float, whole_ms: float) -> float:
    """The spacing whose mean queueing time, over FIT_SEEDS, is the published one. Bisection: queueing falls with it."""
    low, high = 0.8, 1.0
    mean_hold_ms = base_ms + UNIFORM.mean * whole_ms

    def queueing_ms(share: float) -> float:
        fit = Fit(0, 0, base_ms, whole_ms, share * mean_hold_ms / CONNECTIONS, "")
        found = [wait for seed in FIT_SEEDS for wait in fit.predict_waits_ms(UNIFORM, TRANSFERS, seed)]
        return sum(found) / len(found)

    for _ in range(40):
        middle = (low + high) / 2
        if queueing_ms(middle) > TARGET_QUEUEING_MS:
            low = middle
        else:
            high = middle
    return (low + high) / 2 * mean_hold_ms / CONNECTIONS


def line_through(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: (intercept, slope)."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope


def refit(before: Fit, measured: list[tuple[float, float]], how: str) -> Fit:
    """From (miss, transfer in ms) measured without queueing under `before`, the parameters that hit the targets."""
    base_ms, whole_ms = line_through(measured)
    wanted_base_ms, wanted_whole_ms = solve_base_and_whole()
    return Fit(
        rtt_ms=round(before.rtt_ms + wanted_base_ms - base_ms, 1),
        whole_configured_ms=round(before.whole_configured_ms * wanted_whole_ms / whole_ms, 1),
        base_ms=round(wanted_base_ms, 2),
        whole_ms=round(wanted_whole_ms, 2),
        spacing_ms=round(solve_spacing_ms(wanted_base_ms, wanted_whole_ms), 4),
        how=how,
    )


def as_json(fit: Fit) -> dict[str, Any]:
    return {name: getattr(fit, name) for name in Fit.__slots__}
