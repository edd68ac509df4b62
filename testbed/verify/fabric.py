"""Measurement of a datacenter's fabric between two of its hosts: its floor and its ceiling, reported and not judged."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from testbed.model.impairment import Impairment
from testbed.verify import measure
from testbed.verify.judge import Verdict
from testbed.verify.measure import TCP_HEADERS, Ends

PROBES, PROBE_INTERVAL_NS = 100, 2_000_000
WARM_S, MEASURE_S = 0.3, 1.0


@dataclass(frozen=True, slots=True)
class Fabric:
    """`between`: the hosts' names; `ends`: a process in each one's namespaces, and its address."""

    datacenter: str
    between: tuple[str, str]
    ends: tuple[tuple[int, str], tuple[int, str]]
    mtu: int
    rate_bps: int | None
    delay_ns: int

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Fabric":
        (a, b) = ((end["pid"], end["address"]) for end in values["ends"])
        between = (values["between"][0], values["between"][1])
        return cls(values["datacenter"], between, (a, b), values["mtu"], values["rate_bps"], values["delay_ns"])


def measure_fabric(fabric: Fabric) -> list[Verdict]:
    """One way; the other is alike."""
    (source, _), (target, address) = fabric.ends
    ends = Ends(source, target, address)
    delays = measure.probe(ends, Impairment(delay_ns=fabric.delay_ns), PROBES, PROBE_INTERVAL_NS)
    arrived = delays.delays_ns
    note = f"p99 {measure.quantile(arrived, 0.99) / 1e6:.2f} ms: reported" if arrived else "no probe arrived"
    floor = delays.median_ns
    payload = measure.tcp_goodput_bps(ends, WARM_S, MEASURE_S)
    ceiling = None if payload is None else payload * fabric.mtu / (fabric.mtu - TCP_HEADERS)
    return [
        Verdict("delay", "ns", fabric.delay_ns or None, floor, None, None, note, reported=True),
        Verdict("rate (TCP)", "bit/s", fabric.rate_bps, ceiling, None, None, "one flow: reported", reported=True),
    ]
