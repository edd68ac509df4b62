"""The checks of one WAN link, both directions: which measurements, how long, and their verdicts.

Owns the plan of a verification: quick (a fraction of a second beside the link's own delay) and full.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from testbed.model.direction import DIRECTIONS, Direction
from testbed.model.impairment import Impairment, bdp_bytes
from testbed.verify import expected, judge, measure, shares
from testbed.verify.judge import Verdict
from testbed.verify.measure import TCP_HEADERS, Ends, Probes
from testbed.verify.stamps import SMALLEST_PROBE

PROBES, QUICK_PROBES, PROBE_INTERVAL_NS = 200, 20, 5_000_000
# With jitter: as many of its values as there is time for. The quick form's time is shared by its directions.
JITTER_VALUES, JITTER_PROBES, JITTER_SHORTEST_NS, JITTER_LONGEST_NS = 100, 1000, 5_000_000_000, 30_000_000_000
QUICK_JITTER_NS = 800_000_000
MOST_LATE = 0.05  # share of probes that a moment of this machine may have made late
# Longer round trips take a minute to open TCP's window; the UDP train measures the rate of those.
LONGEST_TCP_RTT_NS = 400_000_000

# Around what loads the link as much as it may be loaded.
Loading = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Target:
    """A link as it is to be verified. `floor_ns` is the delay without impairment, measured when the lab came up; None
    where it was not."""

    name: str
    ends: tuple[tuple[int, str], tuple[int, str]]  # (pid, address) of both end hosts
    mtu: int
    asked: Mapping[Direction, Impairment]
    floor_ns: Mapping[Direction, float | None]
    driver: str = "userspace"
    directions: int = 2  # with jitter in this verification, of all links

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Target":
        (a, b) = ((end["pid"], end["address"]) for end in values["ends"])
        asked = {way: Impairment.from_dict(values["asked"][way]) for way in DIRECTIONS}
        floor = values["floor_ns"]
        return cls(values["name"], (a, b), values["mtu"], asked, floor, values["driver"], values["directions"])

    def ends_of(self, direction: Direction) -> Ends:
        source, target = self.ends if direction == "forward" else self.ends[::-1]
        return Ends(source[0], target[0], target[1])


def floor_ns(target: Target) -> dict[Direction, float | None]:
    """Median one-way delay of the bare path: call while the link has no impairment."""
    bare = Impairment()
    return {
        way: measure.probe(target.ends_of(way), bare, QUICK_PROBES, PROBE_INTERVAL_NS // 2).median_ns
        for way in DIRECTIONS
    }


def verify_link(
    target: Target, quick: bool, progress: Callable[[str], None], loading: Loading = nullcontext
) -> dict[str, Any]:
    """Both directions' verdicts, as plain values."""
    result: dict[str, Any] = {"name": target.name, "ok": True, "directions": {}, "times": {}}
    for way in DIRECTIONS:
        progress(f"{target.name} {way}")
        began = time.time()
        verdicts = _verify_direction(target, way, quick, loading)
        result["times"][way] = [began, time.time()]
        result["directions"][way] = [verdict.row() for verdict in verdicts]
        result["ok"] = result["ok"] and all(verdict.ok for verdict in verdicts)
    return result


def _verify_direction(target: Target, way: Direction, quick: bool, loading: Loading) -> list[Verdict]:
    ends, asked = target.ends_of(way), target.asked[way]
    probes, verdicts = _delay_verdicts(target, way, quick)
    with loading():
        train = None if asked.codel else measure.train(ends, asked, target.mtu)
        if quick:
            few = [probes] if train is None else [probes, train]
            rates = [_rate_verdict(asked, train, None, target.mtu)] if asked.rate_bps is not None else []
            return [*verdicts, *rates, *shares.few(few, asked), *_queue_verdicts(asked, None, target.mtu, quick)]
        lossless = all(impairment.loss is None for impairment in target.asked.values())
        overload = measure.overload(ends, asked, target.mtu) if _can_overload(asked) else None
        if asked.rate_bps is not None:
            verdicts.append(_rate_verdict(asked, train, overload, target.mtu))
        verdicts.append(_tcp_verdict(target, way, lossless))
        size = shares.CORRUPTION_PROBE if asked.corruption else SMALLEST_PROBE
        interval_ns = measure.sparse_interval_ns(asked, shares.INTERVAL_NS, size)
        many = measure.probe(ends, asked, shares.count(interval_ns), interval_ns, size)
    verdicts += shares.many(many, asked, target.driver, size, target.floor_ns[way] or 0)
    return verdicts + _queue_verdicts(asked, overload, target.mtu)


def _can_overload(asked: Impairment) -> bool:
    return not (asked.loss or asked.codel or asked.duplication or asked.corruption or asked.reordering)


def _queue_verdicts(
    asked: Impairment, overload: measure.Overload | None, mtu: int, quick: bool = False
) -> list[Verdict]:
    found = []
    if asked.codel is not None:
        note = "not measured: its drops depend on the traffic"
        found.append(Verdict("codel", "ns", asked.codel.target_ns, None, None, None, note))
    if asked.queue_bytes is None:
        return found
    depth = overload.queue_bytes if overload else None
    moves = 6 * asked.jitter.std_ns * (asked.rate_bps or 0) / 8e9 if asked.jitter else 0
    if depth is None or moves > judge.QUEUE_TOLERANCE_SHARE * asked.queue_bytes / 2:
        note = (
            "jitter moves more packets than that"
            if depth is not None
            else "too large, or this machine too busy to fill it"
        )
        if quick:
            note = "the full form does"
        return [*found, Verdict("queue", "bytes", asked.queue_bytes, None, None, None, f"not measured: {note}")]
    return [*found, judge.judge_queue(asked.queue_bytes, depth, mtu)]


def _rate_verdict(asked: Impairment, train: Probes | None, overload: measure.Overload | None, mtu: int) -> Verdict:
    """By what a full buffer let through, or else by the spacing of the train."""
    assert asked.rate_bps is not None
    rate, span_ns = None, 0
    if overload is not None and overload.rate_bps is not None:
        rate, span_ns = overload.rate_bps, overload.span_ns
    elif train is not None:
        rate = measure.spacing_rate_bps(list(train.first.values()), mtu, overtaking=asked.reordering > 0)
        span_ns = len(train.first) // 2 * asked.serialization_ns(mtu)
    if rate is None:
        note = f"above {measure.MAX_TRAIN_RATE_BPS} bit/s single packets cannot tell"
        if asked.codel is not None or asked.rate_bps <= measure.MAX_TRAIN_RATE_BPS:
            note = "not measured: too few packets of a train arrived, or this machine was too busy to send one"
        return Verdict("rate (UDP)", "bit/s", asked.rate_bps, None, None, None, note)
    # Jitter moves either end of a train, by half of the time in between at most (its slope).
    uncertain = min(0.5, 4 * 2**0.5 * asked.jitter.std_ns / span_ns) if asked.jitter and span_ns else 0.0
    note = f"jitter makes it uncertain by {uncertain:.0%}" if uncertain else ""
    return judge.judge_rate("rate (UDP)", asked.rate_bps, rate, note, uncertain)


def _tcp_verdict(target: Target, way: Direction, lossless: bool) -> Verdict:
    """Loss-based congestion control fills the link only where the buffer holds about one BDP."""
    asked = target.asked[way]
    rtt_ns = sum(impairment.delay_ns for impairment in target.asked.values())
    disturbed = any(one.reordering or one.corruption for one in target.asked.values()) or not lossless
    if disturbed or rtt_ns > LONGEST_TCP_RTT_NS:
        note = "loss or reordering shapes TCP" if disturbed else "RTT too long to warm"
        return Verdict("rate (TCP)", "bit/s", asked.rate_bps, None, None, None, f"not measured: {note}")
    payload = measure.tcp_goodput_bps(target.ends_of(way), warm_s=1.0 + 20 * rtt_ns / 1e9, measure_s=2.0)
    measured_bps = None if payload is None else payload * target.mtu / (target.mtu - TCP_HEADERS)
    small = asked.rate_bps is not None and (asked.queue_bytes or 0) < 0.9 * bdp_bytes(asked.rate_bps, rtt_ns)
    if small or asked.codel is not None or asked.duplication:
        note = "buffer below 1 BDP" if small else "codel or duplicates shape TCP"
        return Verdict(
            "rate (TCP)", "bit/s", asked.rate_bps, measured_bps, None, None, f"{note}: reported", reported=True
        )
    return judge.judge_rate("rate (TCP)", asked.rate_bps, measured_bps)


def _delay_verdicts(target: Target, way: Direction, quick: bool) -> tuple[Probes, list[Verdict]]:
    """The delay above the floor and above the probe's own serialization; with jitter its mean and deviation."""
    ends, asked, floor = target.ends_of(way), target.asked[way], target.floor_ns[way]
    least_ns = measure.sparse_interval_ns(asked, PROBE_INTERVAL_NS)
    count, interval_ns = (QUICK_PROBES if quick else PROBES), least_ns
    if asked.jitter is not None:
        shortest, longest = JITTER_SHORTEST_NS, JITTER_LONGEST_NS
        if quick:
            shortest = longest = max(QUICK_PROBES * least_ns, QUICK_JITTER_NS // max(2, target.directions))
        count, interval_ns = expected.probes_for(asked, shortest, longest, JITTER_VALUES, JITTER_PROBES)
        if interval_ns < least_ns:
            count, interval_ns = max(2, count * interval_ns // least_ns), least_ns
    probes = measure.probe(ends, asked, count, interval_ns)
    delays = [delay - asked.serialization_ns(SMALLEST_PROBE) for delay in probes.delays_ns]
    if not delays:
        note = f"none of {probes.sent} probes arrived"
        return probes, [Verdict("delay", "ns", asked.delay_ns, float("inf"), 0, 0, note)]
    told = "floor not measured (up --no-verify): up to 1 ms" if floor is None else f"floor {floor / 1e6:.2f} ms"
    note = f"p99 {measure.quantile(probes.delays_ns, 0.99) / 1e6:.2f} ms, {told}"
    if asked.jitter is not None:
        return probes, _jitter_verdicts(asked, delays, floor, count, interval_ns, note)
    if asked.reordering >= 0.4:
        note = "not measured: too many packets go without it"
        return probes, [Verdict("delay", "ns", asked.delay_ns, None, None, None, note)]
    return probes, [judge.judge_delay(asked.delay_ns, measure.median(delays), floor, note)]


def _jitter_verdicts(
    asked: Impairment, delays: Sequence[float], floor: float | None, count: int, interval_ns: int, note: str
) -> list[Verdict]:
    assert asked.jitter is not None
    above = [delay - (floor or 0) for delay in delays]
    if asked.reordering:  # those that go without the delay are not part of it
        if asked.delay_ns < 12 * asked.jitter.std_ns:
            note = "not measured: packets that go without it cannot be told from jitter"
            return [Verdict("delay", "ns", asked.delay_ns, None, None, None, note)]
        above = [delay for delay in above if delay > asked.delay_ns / 2] or above
    above, late = _without_late(above, asked)
    honest = expected.with_jitter(asked, count, interval_ns)
    spare = judge.UNKNOWN_FLOOR_NS if floor is None else 0
    low, high = honest.mean_ns[0], honest.mean_ns[1] + spare
    sample = f"n = {len(above)} over {honest.values:.1f} values of the jitter"
    sample += f", {late} later than any of them left out" if late else ""
    wide = "" if honest.enough else ", too few to judge"
    mean, deviation = measure.mean(above), measure.deviation(above)
    return [
        judge.judge_within("delay", asked.delay_ns, mean, (low, high), honest.enough, f"mean, {note}, {sample}{wide}"),
        judge.judge_within(
            "jitter", asked.jitter.std_ns, deviation, honest.std_ns, honest.enough, f"deviation, {sample}{wide}"
        ),
    ]


def _without_late(above: Sequence[float], asked: Impairment) -> tuple[list[float], int]:
    """Without the few that no value of the jitter explains: this machine's own moments (without jitter, the median
    leaves out more). Where they are many, they stay."""
    latest = asked.longest_delay_ns() + judge.DELAY_TOLERANCE_NS
    kept = [delay for delay in above if delay <= latest]
    late = len(above) - len(kept)
    return (kept, late) if late <= MOST_LATE * len(above) else (list(above), 0)
