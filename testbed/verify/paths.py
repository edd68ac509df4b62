"""Measurement of the WAN from each host of a lab: its own path to another datacenter, through every device in between.

The links' own measurements go between one host of either datacenter; what is amiss at another host's interface, or at
its port, shows here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from testbed.model.impairment import Impairment
from testbed.verify import judge, measure
from testbed.verify.judge import Verdict
from testbed.verify.measure import Ends

ROUNDS, INTERVAL_NS = 10, 5_000_000
AT_ONCE = 100  # paths


@dataclass(frozen=True, slots=True)
class Path:
    """One direction. `asked`: of the links on the way, in order."""

    name: str
    ends: Ends
    mtu: int
    asked: Sequence[Impairment]
    floor_ns: float | None
    rate_is_told: bool = True

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Path":
        asked = [Impairment.from_dict(one) for one in values["asked"]]
        ends = Ends(values["source_pid"], values["target_pid"], values["address"])
        return cls(values["name"], ends, values["mtu"], asked, values["floor_ns"], values["rate_is_told"])

    @property
    def whole(self) -> Impairment:
        """Delay of all links, and rate and queue of the slowest."""
        limited = [one for one in self.asked if one.rate_bps is not None]
        slowest = min(limited, key=lambda one: one.rate_bps or 0, default=Impairment())
        delay_ns = sum(one.longest_delay_ns() for one in self.asked)
        return Impairment(slowest.rate_bps, delay_ns, slowest.queue_bytes)


def floors(paths: Sequence[Path]) -> dict[str, float | None]:
    """One-way delay of the bare paths: of the quarter that was the least late. Of large labs as many as in the quick
    form: the others' is not known."""
    paths = _some(paths)
    return {
        path.name: measure.quantile(probes.delays_ns, 0.25) if probes.first else None
        for path, probes in _probed(paths, [Impairment()] * len(paths), INTERVAL_NS // 2)
    }


def verify_paths(paths: Sequence[Path], quick: bool) -> list[dict[str, Any]]:
    """Delay of each path, of large labs in the quick form of some; the full form adds the rate, one after the other."""
    paths = _some(paths) if quick else paths
    wholes = [path.whole for path in paths]
    interval_ns = max((measure.sparse_interval_ns(whole, INTERVAL_NS) for whole in wholes), default=INTERVAL_NS)
    found = []
    for (path, probes), whole in zip(_probed(paths, wholes, interval_ns), wholes, strict=True):
        verdicts = [_delay(path, probes)]
        if not quick and _rate_is_told(path):
            train = measure.train(path.ends, whole, path.mtu)
            rate = None if train is None else measure.spacing_rate_bps(list(train.first.values()), path.mtu)
            verdicts.append(judge.judge_rate("rate (UDP)", whole.rate_bps, rate))
        rows = [verdict.row() for verdict in verdicts]
        found.append({"name": path.name, "figures": rows, "ok": all(row["ok"] for row in rows)})
    return found


def _some(paths: Sequence[Path]) -> Sequence[Path]:
    return paths[:: -(-len(paths) // AT_ONCE)] if paths else paths


def _probed(paths: Sequence[Path], wholes: Sequence[Impairment], interval_ns: int) -> list[tuple[Path, measure.Probes]]:
    """A part at a time: each path takes two descriptors."""
    found: list[tuple[Path, measure.Probes]] = []
    for first in range(0, len(paths), AT_ONCE):
        part, asked = paths[first : first + AT_ONCE], wholes[first : first + AT_ONCE]
        probed = measure.probe_together([path.ends for path in part], asked, ROUNDS, interval_ns)
        found += zip(part, probed, strict=True)
    return found


def _delay(path: Path, probes: measure.Probes) -> Verdict:
    asked_ns = sum(one.delay_ns for one in path.asked)
    serialization = sum(one.serialization_ns(measure.SMALLEST_PROBE) for one in path.asked)
    if probes.median_ns is None:
        if any(one.loss for one in path.asked):
            return Verdict("delay", "ns", asked_ns, None, None, None, "not measured: every probe was lost")
        return Verdict("delay", "ns", asked_ns, float("inf"), 0, 0, f"none of {probes.sent} probes arrived")
    # Few probes, and all hosts' at once: a busy machine makes many late, and none early.
    measured_ns = measure.quantile(probes.delays_ns, 0.25) - serialization
    if any(one.jitter or one.reordering for one in path.asked):
        # Few probes meet one or two values of the jitter: only what no value gives is told.
        spread = sum(one.longest_delay_ns() - one.delay_ns for one in path.asked)
        lowest = 0 if any(one.reordering for one in path.asked) else max(0, asked_ns - spread)
        interval = (lowest, asked_ns + spread)
        note = "n = 1 value of the jitter: too few to judge"
        return judge.judge_within("delay", asked_ns, measured_ns - (path.floor_ns or 0), interval, False, note)
    return judge.judge_delay(asked_ns, measured_ns, path.floor_ns)


def _rate_is_told(path: Path) -> bool:
    return path.rate_is_told and not any(one.jitter or one.reordering or one.codel for one in path.asked)
