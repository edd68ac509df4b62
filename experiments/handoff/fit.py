"""The fitted parameters of `handoff`: KV bytes and the named congestion, for three published figures. See fit.json.

The peak is a transfer that falls into a burst altogether: it fixes the low rate. Mean and standard deviation fix how
long bursts and pauses are, for the bytes given. All of it is arithmetic on the fluid model; nothing is measured.

The congestion is free bandwidth that is high, and low in bursts; times in both states are exponentially distributed.
The fluid model is of a queue that never runs empty: a transfer's bytes leave at whatever rate is free.
"""

import bisect
import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from experiments.framework.directory import write_whole

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
    """Timeline as `pddbed wan play` reads it."""
    rows = [f"{at:.6f},{rate / 1e6:.6f}" for at, rate in levels]
    return "\n".join(["time:s,rate:mbit", *rows]) + "\n"


def drain_s(levels: Levels, start_s: float, bits: float) -> float:
    """Seconds that `bits` take from `start_s` on; the last level goes on for ever."""
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


FIT_FILE = Path(__file__).parent / "fit.json"
TOKENS = 100
MEAN_MS, PEAK_MS, STD_MS = 185.4, 512.6, 96.3  # KV over Ethernet
RECOMPUTE_MEAN_MS, RECOMPUTE_MAX_MS, RECOMPUTE_STD_MS = 305.2, 321.4, 4.8
HOST_COPIES_MS = 24.5
LINK_BPS, DELAY_MS = 100e6, 20.0  # as topologies/handoff.yaml has them
WIRE_SHARE = 1448 / 1500  # TCP payload of an IP packet's bytes
SPACING_S = 0.6  # from one transfer to the next: more than the longest takes
_FIT_SEEDS = range(101, 105)
_FIT_TRANSFERS = 1000


@dataclass(frozen=True, slots=True)
class Fit:
    """Parameters that were found, and how."""

    bytes_per_token: int
    low_bps: float
    burst_ms: float
    pause_ms: float
    how: str

    @classmethod
    def read(cls, file: Path = FIT_FILE) -> Self:
        return cls(**json.loads(file.read_text()))

    @property
    def congestion(self) -> Congestion:
        return Congestion(LINK_BPS, self.low_bps, self.burst_ms, self.pause_ms)

    @property
    def wire_bits(self) -> float:
        """Bits of one transfer, headers included."""
        return TOKENS * self.bytes_per_token * 8 / WIRE_SHARE

    def predict_ms(self, transfers: int, seed: int) -> list[float]:
        """Transfer times under the congestion, by the fluid model."""
        levels = self.congestion.levels(transfers * SPACING_S + 5, seed)
        return [DELAY_MS + 1000 * drain_s(levels, index * SPACING_S, self.wire_bits) for index in range(transfers)]


def low_bps(bytes_per_token: int) -> float:
    """The rate at which a whole transfer takes as long as the published peak."""
    return TOKENS * bytes_per_token * 8 / WIRE_SHARE / ((PEAK_MS - DELAY_MS) / 1000)


def search(bytes_per_token: int) -> Fit:
    """The burst and pause whose mean and deviation are nearest to the published ones: a grid, made finer twice."""
    burst_ms, pause_ms, step = 200.0, 500.0, 1.6
    low = round(low_bps(bytes_per_token))

    def miss(burst: float, pause: float) -> float:
        fit = Fit(bytes_per_token, low, burst, pause, "")
        times = [time for seed in _FIT_SEEDS for time in fit.predict_ms(_FIT_TRANSFERS, seed)]
        return abs(statistics.fmean(times) / MEAN_MS - 1) + abs(statistics.pstdev(times) / STD_MS - 1)

    for _ in range(6):
        factors = (1 / step, 1.0, step)
        grid = [(burst_ms * one, pause_ms * other) for one in factors for other in factors]
        burst_ms, pause_ms = min(grid, key=lambda pair: miss(*pair))
        step = step**0.62
    how = (
        "low rate: the one at which a whole transfer takes the published peak; burst and pause: a search over the "
        f"fluid model, {len(_FIT_SEEDS)} x {_FIT_TRANSFERS} transfers with seeds that no run uses; "
        f"{miss(burst_ms, pause_ms):.1%} off mean and deviation together"
    )
    return Fit(bytes_per_token, low, round(burst_ms, 1), round(pause_ms, 1), how)


def refit_by_arithmetic(say: Callable[[str], None]) -> Iterator[str]:
    """Search anew for the bytes that are fitted for, and write what was found."""
    before = Fit.read()
    say("searching")
    found = search(before.bytes_per_token)
    write_whole(FIT_FILE, json.dumps(asdict(found), indent=1) + "\n")
    for name, value in asdict(found).items():
        yield f"{name:<16} {value}" if name == "how" else f"{name:<16} {getattr(before, name)} -> {value}"
