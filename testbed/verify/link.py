"""The checks of one WAN link, both directions: which measurements, how long, and their verdicts.

Owns the plan of a verification: quick (delay and rate, a fraction of a second beside the link's own delay) and full.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from testbed.impairment import GilbertElliottLoss, Impairment, bdp_bytes
from testbed.links.base import DIRECTIONS, Direction
from testbed.verify import judge, measure
from testbed.verify.judge import Verdict
from testbed.verify.measure import TCP_HEADERS, Ends

PROBES, QUICK_PROBES, PROBE_INTERVAL_NS = 200, 20, 5_000_000
JITTER_PROBES = 1000
LOSS_PROBES = 20_000
# Longer round trips take a minute to open TCP's window; the UDP train measures the rate of those.
LONGEST_TCP_RTT_NS = 400_000_000


@dataclass(frozen=True, slots=True)
class Target:
    """A link as it is to be verified. `floor_ns` is the delay without impairment, measured when the lab came up."""

    name: str
    ends: tuple[tuple[int, str], tuple[int, str]]  # (pid, address) of both end hosts
    mtu: int
    asked: Mapping[Direction, Impairment]
    floor_ns: Mapping[Direction, float]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Target":
        (a, b) = ((end["pid"], end["address"]) for end in values["ends"])
        asked = {way: Impairment.from_dict(values["asked"][way]) for way in DIRECTIONS}
        return cls(values["name"], (a, b), values["mtu"], asked, values["floor_ns"])

    def ends_of(self, direction: Direction) -> Ends:
        source, target = self.ends if direction == "forward" else self.ends[::-1]
        return Ends(source[0], target[0], target[1])


def floor_ns(target: Target) -> dict[Direction, float]:
    """Median one-way delay of the bare path: call while the link has no impairment."""
    bare = Impairment()
    return {
        way: float(measure.delays(target.ends_of(way), bare, QUICK_PROBES, PROBE_INTERVAL_NS // 2).median_ns)
        for way in DIRECTIONS
    }


def verify_link(target: Target, quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Both directions' verdicts, as plain values."""
    result: dict[str, Any] = {"name": target.name, "ok": True, "directions": {}}
    for way in DIRECTIONS:
        progress(f"{target.name} {way}")
        verdicts = list(_verify_direction(target, way, quick))
        result["directions"][way] = [verdict.row() for verdict in verdicts]
        result["ok"] = result["ok"] and all(verdict.ok for verdict in verdicts)
    return result


def _verify_direction(target: Target, way: Direction, quick: bool) -> list[Verdict]:
    ends, asked = target.ends_of(way), target.asked[way]
    verdicts = _delay_verdicts(ends, asked, target.floor_ns[way], quick)
    overload = None if quick or asked.loss or asked.codel else measure.overload(ends, asked, target.mtu)
    rate = overload.rate_bps if overload else measure.train_rate_bps(ends, asked, target.mtu)
    if asked.rate_bps is not None:
        note = "" if rate is not None else f"above {measure.MAX_TRAIN_RATE_BPS} bit/s single packets cannot tell"
        if overload is None and (asked.jitter or asked.reordering):
            # 1 ms at either end of a train of 40 ms is more than the tolerance.
            note = "jitter moves the ends of a short train: reported, not judged"
            verdicts.append(Verdict("rate (UDP)", "bit/s", asked.rate_bps, rate, None, None, note))
        else:
            verdicts.append(judge.judge_rate("rate (UDP)", asked.rate_bps, rate, note))
    if quick:
        return verdicts
    rtt_ns = sum(impairment.delay_ns for impairment in target.asked.values())
    lossless = all(impairment.loss is None for impairment in target.asked.values())
    if rtt_ns <= LONGEST_TCP_RTT_NS and lossless and asked.reordering == 0:
        payload = measure.tcp_goodput_bps(ends, warm_s=1.0 + 20 * rtt_ns / 1e9, measure_s=2.0)
        at_ip = None if payload is None else payload * target.mtu / (target.mtu - TCP_HEADERS)
        verdicts.append(_tcp_verdict(asked, rtt_ns, at_ip))
    else:
        reason = "not measured: loss or reordering shapes TCP" if not lossless else "not measured: RTT too long to warm"
        verdicts.append(Verdict("rate (TCP)", "bit/s", asked.rate_bps, None, None, None, reason))
    lost = measure.losses(ends, asked, LOSS_PROBES)
    mean = asked.loss.mean if asked.loss else 0.0
    verdicts.append(judge.judge_loss(mean, lost, isinstance(asked.loss, GilbertElliottLoss)))
    if lossless and asked.codel is None:
        depth = overload.queue_bytes if overload else None
        verdicts.append(judge.judge_queue(asked.queue_bytes, depth, target.mtu))
    return verdicts


def _tcp_verdict(asked: Impairment, rtt_ns: int, measured_bps: float | None) -> Verdict:
    """Loss-based congestion control fills the link only where the buffer holds about one BDP."""
    if asked.rate_bps is not None and (asked.queue_bytes or 0) < 0.9 * bdp_bytes(asked.rate_bps, rtt_ns):
        note = "buffer below 1 BDP: reported, not judged"
        return Verdict("rate (TCP)", "bit/s", asked.rate_bps, measured_bps, None, None, note)
    return judge.judge_rate("rate (TCP)", asked.rate_bps, measured_bps)


def _delay_verdicts(ends: Ends, asked: Impairment, floor: float, quick: bool) -> list[Verdict]:
    count = QUICK_PROBES if quick else JITTER_PROBES if asked.jitter else PROBES
    delays = measure.delays(ends, asked, count, PROBE_INTERVAL_NS)
    if not delays.delays_ns:
        return [Verdict("delay", "ns", asked.delay_ns, float("inf"), 0, 0, f"none of {delays.sent} probes arrived")]
    spread = f"p99 {delays.quantile(0.99) / 1e6:.2f} ms, floor {floor / 1e6:.2f} ms"
    verdict = judge.judge_delay(asked.delay_ns, delays.median_ns, floor)
    if asked.jitter or asked.reordering:
        # With jitter the median follows the distribution's shape: realised figures are reported as what they are.
        verdict = Verdict("delay", "ns", asked.delay_ns, delays.mean_ns - floor, None, None, f"mean, {spread}")
        jitter_ns = asked.jitter.std_ns if asked.jitter else None
        return [verdict, Verdict("jitter", "ns", jitter_ns, delays.std_ns, None, None, "standard deviation, reported")]
    return [Verdict(verdict.figure, "ns", verdict.asked, verdict.measured, verdict.low, verdict.high, spread)]
