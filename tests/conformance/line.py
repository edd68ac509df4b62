"""host a -- router a == WAN link == router b -- host b in real namespaces, and ways to measure between the hosts.

Measures from hosts, not from the routers: a sender that sees its own device's queue behaves differently.
"""

import json
import os
import re
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from testbed.links import make_link
from testbed.links.ordering import keep_flows_in_order
from testbed.links.rig import HOST_B, rig
from testbed.links.shaping import gso_cap_bytes
from testbed.links.tc_messages import open_netlink
from testbed.model.direction import DIRECTIONS
from testbed.model.impairment import Impairment

CLEAR = Impairment()
MTU = 1500
EMULATED = "PDDBED_VM" in os.environ
# By how much the fastest of many round trips may exceed what was asked and the unimpaired line's fastest: two timers,
# which are late by 0.1 ms on a real machine and by up to 1 ms each on an emulated one.
SLACK_MS = 1.5 if EMULATED else 0.4


@dataclass(frozen=True, slots=True)
class Pings:
    """What one run of ping saw: round trips by sequence number, the order of answers, and how many came twice."""

    sent: int
    times_ms: dict[int, float]
    order: list[int]
    duplicates: int

    @property
    def lost(self) -> list[int]:
        return [number for number in range(1, self.sent + 1) if number not in self.times_ms]


class Line:
    """A link of the named driver and its two hosts. Starts unimpaired; `floor_ms` is its fastest round trip then."""

    def __init__(self, driver: str) -> None:
        self.driver = driver
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        run_dir = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        built = self._stack.enter_context(rig(partial(make_link, self.driver), run_dir, CLEAR))
        self.link = built.link
        self.pids = {name: getattr(built, name) for name in ("host_a", "router_a", "node", "router_b", "host_b")}
        for pid in self.pids.values():
            keep_flows_in_order(pid)
        self.floor_ms = min(self.round_trips_ms(count=100, interval_s=0.01))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def set(self, both: Impairment = CLEAR, **backward: Any) -> None:
        """Both directions; keywords change the backward one. The hosts' super-packets are capped as a lab caps them."""
        for direction, host, impairment in (
            ("forward", "host_a", both),
            ("backward", "host_b", replace(both, **backward)),
        ):
            self.link.apply(direction, impairment)
            cap = gso_cap_bytes(impairment.rate_bps, MTU)
            with open_netlink(self.pids[host]) as netlink:
                netlink.link("set", index=netlink.link_lookup(ifname="eth0")[0], gso_max_size=cap)

    def run(self, host: str, *command: str, timeout_s: float = 60) -> str:
        """Run a command in a namespace and return what it prints; a failure shows both streams."""
        result = subprocess.run(self.inside(host, *command), capture_output=True, text=True, timeout=timeout_s)
        assert result.returncode == 0, f"{' '.join(command)}: {result.stdout}{result.stderr}"
        return result.stdout

    def inside(self, host: str, *command: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.pids[host]}/ns/net", *command]

    def round_trips_ms(self, count: int, interval_s: float = 0.05, payload_bytes: int = 56) -> list[float]:
        """Of pings from host a to host b, every one answered."""
        pings = self.ping(count, interval_s, payload_bytes)
        assert not pings.lost
        return list(pings.times_ms.values())

    def ping(self, count: int, interval_s: float, payload_bytes: int = 56) -> Pings:
        """From host a to host b; answers may fail to come."""
        options = ("-n", "-c", str(count), "-i", str(interval_s), "-s", str(payload_bytes), "-W", "3")
        result = subprocess.run(self.inside("host_a", "ping", *options, HOST_B), capture_output=True, text=True)
        answers = [
            (int(number), float(time_ms), bool(again))
            for number, time_ms, again in re.findall(
                r"icmp_seq=(\d+) ttl=\d+ time=([\d.]+) ms( \(DUP!\))?", result.stdout
            )
        ]
        first = [(number, time_ms) for number, time_ms, again in answers if not again]
        return Pings(count, dict(first), [number for number, _ in first], len(answers) - len(first))

    def iperf(self, *options: str, seconds: float, timeout_s: float = 90) -> dict[str, Any]:
        """iperf3 from host a to host b: the *server's* report."""
        server = self.iperf_server()
        try:
            self.run("host_a", "iperf3", "-c", HOST_B, "-t", str(seconds), *options, timeout_s=timeout_s)
            report: dict[str, Any] = json.loads(server.communicate(timeout=timeout_s)[0])
            return report
        finally:
            server.kill()
            server.wait()

    def iperf_server(self) -> "subprocess.Popen[str]":
        """For one client; its output is the report."""
        command = self.inside("host_b", "iperf3", "-s", "-1", "-J")
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(200):
            if ":5201" in self.run("host_b", "ss", "-Hltn"):
                return server
        raise AssertionError("iperf3 does not listen")

    def settle(self) -> None:
        """Returns when nothing has crossed for 0.3 s and no connection of an earlier test is still saying goodbye."""
        unfinished = ("ss", "-Htan", "state", "connected", "exclude", "time-wait")
        before = None
        while before != (before := self.link.counters()) or any(self.run(h, *unfinished) for h in ("host_a", "host_b")):
            time.sleep(0.3)

    def count(self, name: str) -> int:
        """A counter of the link, both directions together."""
        counters = self.link.counters()
        return sum(counters[direction][name] for direction in DIRECTIONS)

    def arrived(self) -> int:
        """Packets that router b's end of the link has received, by the kernel's own count."""
        with open_netlink(self.pids["router_b"]) as netlink:
            (end,) = netlink.link("get", ifname="wan-b")
            return int(end.get_attr("IFLA_STATS64")["rx_packets"])
