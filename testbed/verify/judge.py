"""Verdict on each figure of a measured link: is it what was asked? Pure.

Owns the tolerances and the intervals. A figure that was not measured is not judged, and says so.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

DELAY_TOLERANCE_NS = 300_000
DELAY_TOLERANCE_SHARE = 0.01
RATE_TOLERANCE_SHARE = 0.02
QUEUE_TOLERANCE_SHARE = 0.10
UNKNOWN_FLOOR_NS = 1_000_000
MOST_UNCERTAIN = 0.5  # beyond this a rate is not judged
Z = 3.2905  # two-sided 99.9 % of the normal distribution: a full verification judges some twenty figures a link


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure: what was asked, what was measured, the interval that would do, whether it did. Base units."""

    figure: str
    unit: str
    asked: float | None
    measured: float | None
    low: float | None
    high: float | None
    note: str = ""
    reported: bool = False  # measured for people; nobody is to judge it

    @property
    def ok(self) -> bool:
        """True also where nothing is judged."""
        if self.measured is None or self.low is None or self.high is None:
            return True
        return self.low <= self.measured <= self.high

    @property
    def judged(self) -> bool:
        return self.measured is not None and self.low is not None

    @property
    def verdict(self) -> str:
        """Verdict as people read it: `ok`, `FAILED`; of what is not judged `not measured` where something is asked."""
        if self.judged:
            return "ok" if self.ok else "FAILED"
        return "not measured" if self.asked and not self.reported else "reported"

    def row(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "judged": self.judged, "ok": self.ok, "verdict": self.verdict}


def judge_delay(asked_ns: int, median_ns: float, floor_ns: float | None, note: str = "") -> Verdict:
    """Median one-way delay, less the floor that was there without any impairment; unknown, it may be up to 1 ms."""
    tolerance = DELAY_TOLERANCE_NS + DELAY_TOLERANCE_SHARE * asked_ns
    high = asked_ns + tolerance + (UNKNOWN_FLOOR_NS if floor_ns is None else 0)
    return Verdict("delay", "ns", asked_ns, median_ns - (floor_ns or 0), asked_ns - tolerance, high, note)


def judge_within(
    figure: str, asked_ns: int, measured_ns: float, interval_ns: tuple[float, float], enough: bool, note: str
) -> Verdict:
    """A figure of a delay with jitter, against the interval of honest links. Where the sample is too small to tell
    anything, what lies inside is not measured; what lies outside failed all the same."""
    tolerance = DELAY_TOLERANCE_NS + DELAY_TOLERANCE_SHARE * asked_ns
    low, high = interval_ns[0] - tolerance, interval_ns[1] + tolerance
    if figure == "jitter":  # this machine's own timers only ever add to a deviation
        low = interval_ns[0]
    verdict = Verdict(figure, "ns", asked_ns, measured_ns, low, high, note)
    return verdict if enough or not verdict.ok else Verdict(figure, "ns", asked_ns, measured_ns, None, None, note)


def judge_rate(
    figure: str, asked_bps: float | None, measured_bps: float | None, note: str = "", uncertain: float = 0.0
) -> Verdict:
    """Within 2 % of what was asked, and the share that is uncertain; reported only where there is no limit."""
    if asked_bps is None:
        return Verdict(figure, "bit/s", None, measured_bps, None, None, "unlimited: reported, not judged")
    tolerance = RATE_TOLERANCE_SHARE + uncertain
    if tolerance > MOST_UNCERTAIN:
        return Verdict(figure, "bit/s", asked_bps, measured_bps, None, None, note)
    return Verdict(
        figure, "bit/s", asked_bps, measured_bps, asked_bps * (1 - tolerance), asked_bps * (1 + tolerance), note
    )


def judge_loss(asked: float, lost: Sequence[bool], bursty: bool, seed: int = 0) -> Verdict:
    """The asked share must lie in the 99.9 % interval around the measured one (so the interval is turned around)."""
    interval = bootstrap_interval(lost, seed) if bursty else None
    return judge_share("loss", asked, sum(lost), len(lost), interval)


def judge_share(
    figure: str, asked: float, hits: int, count: int, interval: tuple[float, float] | None = None, spare: float = 0.0
) -> Verdict:
    """A share of `count` probes. `spare`: what may be there unasked."""
    low, high = interval or wilson_interval(hits, count)
    share = hits / count
    # `ok` asks whether the measured value lies between low and high; shift the interval onto the asked value.
    return Verdict(figure, "share", asked, share, asked - (high - share), asked + (share - low) + spare, f"n = {count}")


def judge_queue(asked_bytes: int | None, measured_bytes: int | None, mtu: int) -> Verdict:
    """Within 10 % and two packets."""
    if asked_bytes is None:
        return Verdict("queue", "bytes", None, measured_bytes, None, None)
    tolerance = QUEUE_TOLERANCE_SHARE * asked_bytes + 2 * mtu
    return Verdict("queue", "bytes", asked_bytes, measured_bytes, asked_bytes - tolerance, asked_bytes + tolerance)


def wilson_interval(hits: int, count: int, z: float = Z) -> tuple[float, float]:
    """Score interval of a binomial share (Wilson 1927): sensible at 0 and at small shares."""
    share = hits / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return centre - half if hits else 0.0, centre + half if hits < count else 1.0


def bootstrap_interval(lost: Sequence[bool], seed: int, block: int = 200, rounds: int = 2000) -> tuple[float, float]:
    """99.9 % interval of the mean by resampling blocks, for losses that come in bursts (Kuensch 1989)."""
    sums = [sum(lost[start : start + block]) for start in range(0, len(lost) - block + 1, block)]
    if len(sums) < 10:
        return 0.0, 1.0
    generator = random.Random(seed)
    means = sorted(sum(generator.choices(sums, k=len(sums))) / (len(sums) * block) for _ in range(rounds))
    return means[int(0.0005 * rounds)], means[min(rounds - 1, int(0.9995 * rounds))]
