"""Verifying the links of a running lab, and whether what it measured can be trusted.

Owns the floor (delay without impairment, taken once when the lab comes up) and the reasons that make a run
unfaithful (those of paced workers are read by `pace`). The measuring itself is `testbed.verify`'s, in a process of
its own.
"""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from testbed.interpreter import environment, program
from testbed.lab.drops import DropWatch, receive_buffer_errors
from testbed.lab.endpoints import endpoints
from testbed.lab.network import Network
from testbed.lab.pace import pace_reasons, read_pace
from testbed.lab.wan import WanControl
from testbed.links.base import DIRECTIONS
from testbed.topology.plan import LabPlan

LATEST_P99_NS = 1_000_000
BUSIEST_RELAY = 0.9
MOST_STOLEN = 0.05  # share of CPU time that the hypervisor gave to somebody else


class VerificationError(Exception):
    """The measuring process failed; the message carries what it said."""


class Verification:
    """Measures the links of one lab."""

    def __init__(self, plan: LabPlan, network: Network, wan: WanControl, records: Path) -> None:
        self._plan = plan
        self._records = records
        self._network = network
        self._wan = wan
        self._floor: dict[str, dict[str, float]] = {}
        self.last: dict[str, Any] | None = None
        self._cpu_before = psutil.cpu_times()
        self._drops = DropWatch(network.pids())
        self._lost_probes = 0

    def measure_floor(self) -> None:
        """Measure the bare path: call while no link has an impairment, and before there is traffic."""
        self._floor = self._run("floor", quick=True)["floors"]

    def run(self, quick: bool) -> dict[str, Any]:
        """Measure every link as it is asked to be now: `links`, `fabrics`, `ok`, `faithful`, `reasons`."""
        result = self._run("verify", quick)
        reasons = self.unfaithful_reasons()
        result["ok"] = all(link["ok"] for link in result["links"])
        result["quick"] = quick
        result["faithful"] = not reasons
        result["reasons"] = reasons
        self.last = result
        return result

    def unfaithful_reasons(self) -> list[str]:
        """Why figures measured in this lab so far are not to be trusted; empty when they are."""
        reasons = []
        for name, link in self._network.links.items():
            for direction, counters in link.counters().items():
                if counters["dropped_unasked"]:
                    reasons.append(f'wan "{name}" {direction}: {counters["dropped_unasked"]} packets dropped unasked')
            lateness = getattr(link, "lateness", None)
            if lateness is not None:
                reasons += _relay_reasons(name, lateness(), link.health())  # type: ignore[attr-defined]
        reasons += self._drops.reasons()
        if self._lost_probes:
            reasons.append(f"{self._lost_probes} probes found no room in their receiver's buffer")
        return reasons + self._cpu_reasons() + pace_reasons(read_pace(self._records))

    def _cpu_reasons(self) -> list[str]:
        now = psutil.cpu_times()
        total = sum(now) - sum(self._cpu_before)
        stolen = getattr(now, "steal", 0.0) - getattr(self._cpu_before, "steal", 0.0)
        if total > 0 and stolen / total > MOST_STOLEN:
            return [f"the hypervisor took {stolen / total:.0%} of this machine's CPU time"]
        return []

    def _run(self, what: str, quick: bool) -> dict[str, Any]:
        for link in self._network.links.values():
            link.counters()  # a broken link says so, and how it broke
        request = {
            "what": what,
            "quick": quick,
            "links": [self._target(wan.name, wan.mtu) for wan in self._plan.wans],
            "fabrics": [] if quick else self._fabrics(),
        }
        ends = [end.pid for wan in self._plan.wans for end in endpoints(self._plan, self._network, wan.name)]
        without_room = sum(map(receive_buffer_errors, ends))
        process = subprocess.run(
            program("testbed.verify"), input=json.dumps(request), capture_output=True, text=True, env=environment()
        )
        self._lost_probes += sum(map(receive_buffer_errors, ends)) - without_room
        if process.returncode != 0:
            said = process.stderr.strip().splitlines()[-1:] or [f"status {process.returncode}"]
            raise VerificationError(f"measuring the links failed: {said[0]}")
        result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        return result

    def _fabrics(self) -> list[dict[str, Any]]:
        """Between the first two hosts of each datacenter, or its router and its only host."""
        found = []
        for datacenter in self._plan.datacenters:
            ends = [(host.name, host.address) for host in datacenter.hosts]
            ends.append((f"router.{datacenter.name}", datacenter.router_address))
            if len(ends) > 1:
                found.append(
                    {
                        "datacenter": datacenter.name,
                        "between": [name for name, _ in ends[:2]],
                        "ends": [
                            {"pid": self._network.pid_of(name), "address": str(address.ip)}
                            for name, address in ends[:2]
                        ],
                        "mtu": datacenter.fabric_mtu,
                        "rate_bps": datacenter.fabric_rate_bps,
                        "delay_ns": datacenter.fabric_delay_ns,
                    }
                )
        return found

    def _target(self, name: str, mtu: int) -> dict[str, Any]:
        ends = endpoints(self._plan, self._network, name)
        return {
            "name": name,
            "ends": [{"pid": end.pid, "address": str(end.address)} for end in ends],
            "mtu": mtu,
            "asked": {way: self._wan.asked(name, way).to_dict() for way in DIRECTIONS},
            "floor_ns": self._floor.get(name, dict.fromkeys(DIRECTIONS, 0.0)),
        }


def _relay_reasons(name: str, lateness: dict[str, dict[str, Any]], health: dict[str, Any]) -> Iterable[str]:
    for direction, histogram in lateness.items():
        if histogram["count"] and histogram["p99_ns"] > LATEST_P99_NS:
            yield f'wan "{name}" {direction}: the relay was late, p99 {histogram["p99_ns"] / 1e6:.1f} ms (limit 1 ms)'
    if health["busy_max"] > BUSIEST_RELAY:
        yield f'wan "{name}": the relay was {health["busy_max"]:.0%} busy (limit {BUSIEST_RELAY:.0%})'
