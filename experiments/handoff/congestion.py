"""The named congestion: free bandwidth that is high, and low in bursts; and how long bytes take through it. Pure.

Times in both states are exponentially distributed. The drain time is a fluid model of a queue that never runs empty: a
transfer's bytes leave at whatever rate is free.
"""

import bisect
import random
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_S = 0.02  # of a state: shorter ones say more about the player than about the link
Levels = Sequence[tuple[float, float]]  # (seconds since the beginning, bits a second), ascending


@dataclass(frozen=True, slots=True)
class Congestion:
    """Bursts of `burst_ms` and pauses of `pause_ms`, in the mean."""

    high_bps: float
    low_bps: float
    burst_ms: float
    pause_ms: float

    def levels(self, seconds: float, seed: int) -> list[tuple[float, float]]:
        """The rate over time, for at least so long."""
        source = random.Random(f"congestion {seed}")
        at, low = 0.0, False
        made = []
        while at < seconds:
            made.append((at, self.low_bps if low else self.high_bps))
            at += max(LEAST_S, source.expovariate(1000 / (self.burst_ms if low else self.pause_ms)))
            low = not low
        return made


def as_csv(levels: Levels) -> str:
    """As `pddbed wan play` reads it."""
    rows = [f"{at:.6f},{rate / 1e6:.6f}" for at, rate in levels]
    return "\n".join(["time:s,rate:mbit", *rows]) + "\n"


def drain_s(levels: Levels, start_s: float, bits: float) -> float:
    """How long `bits` take from `start_s` on; the last level goes on for ever."""
    index = bisect.bisect_right(levels, (start_s, float("inf"))) - 1
    at = start_s
    while index + 1 < len(levels):
        end, rate = levels[index + 1][0], levels[index][1]
        if (end - at) * rate >= bits:
            return at + bits / rate - start_s
        bits -= (end - at) * rate
        at = end
        index += 1
    return at + bits / levels[index][1] - start_s
