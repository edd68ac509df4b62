"""host a -- router a == NetemLink == router b -- host b: five real namespaces, and ways to measure between the hosts.

Measures from hosts, not from the routers: a sender that sees its own device's queue behaves differently.
"""

import json
import re
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any, Self

from testbed.impairment import Impairment
from testbed.links.base import DIRECTIONS, WanEnd
from testbed.links.netem import NetemLink
from testbed.links.ordering import keep_flows_in_order
from testbed.links.shaping import gso_cap_bytes
from testbed.links.tc_messages import open_netlink
from testbed.netns import network_namespace_of
from testbed.topology.plan import WanPlan

CLEAR = Impairment()
HOST_A, HOST_B = "10.1.0.2", "10.2.0.2"
MTU = 1500


class Line:
    """The built link and its two hosts. Starts unimpaired; `floor_ms` is the fastest round trip measured then."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        names = ("host-a", "router-a", "node", "router-b", "host-b")
        self.pids = {name: self._namespace() for name in names}
        ends = (
            WanEnd(self.pids["router-a"], "wan0", IPv4Interface("172.31.0.0/31")),
            WanEnd(self.pids["router-b"], "wan0", IPv4Interface("172.31.0.1/31")),
        )
        plan = WanPlan("wan0", "a", "b", ends[0].address, ends[1].address, CLEAR, CLEAR, "netem", MTU)
        self.link = NetemLink(plan, ends, self.pids["node"], Path("/nonexistent"))
        self.link.build()
        self._attach("a", "10.1.0", "10.2.0.0/24", str(ends[1].address.ip))
        self._attach("b", "10.2.0", "10.1.0.0/24", str(ends[0].address.ip))
        for pid in self.pids.values():
            keep_flows_in_order(pid)
        self.floor_ms = min(self.round_trips_ms(count=20))
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()
        self._stack.close()

    def set(self, both: Impairment = CLEAR, **backward: Any) -> None:
        """Both directions; keywords change the backward one. The hosts' super-packets are capped as a lab caps them."""
        for direction, host, impairment in (
            ("forward", "host-a", both),
            ("backward", "host-b", replace(both, **backward)),
        ):
            self.link.apply(direction, impairment)
            cap = gso_cap_bytes(impairment.rate_bps, MTU, impairment.queue_bytes)
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
        options = ("-n", "-c", str(count), "-i", str(interval_s), "-s", str(payload_bytes))
        output = self.run("host-a", "ping", *options, HOST_B)
        times = [float(found) for found in re.findall(r"time=([\d.]+) ms", output)]
        assert len(times) == count, output
        return times

    def iperf(self, *options: str, seconds: float, timeout_s: float = 90) -> dict[str, Any]:
        """iperf3 from host a to host b: the `end` part of the *server's* report."""
        server = subprocess.Popen(
            self.inside("host-b", "iperf3", "-s", "-1", "-J", "--forceflush"), stdout=subprocess.PIPE, text=True
        )
        try:
            self._wait_for_port()
            self.run("host-a", "iperf3", "-c", HOST_B, "-t", str(seconds), *options, timeout_s=timeout_s)
            report: dict[str, Any] = json.loads(server.communicate(timeout=timeout_s)[0])
            return report
        finally:
            server.kill()
            server.wait()

    def dropped(self, name: str) -> int:
        """The counter `dropped_<name>` of both directions together."""
        counters = self.link.counters()
        return sum(counters[direction][f"dropped_{name}"] for direction in DIRECTIONS)

    def receive_buffer_errors(self) -> int:
        """UDP packets that reached host b and found its socket full: the receiver's affair, not the link's."""
        return int(re.findall(r"UdpRcvbufErrors +(\d+)", self.run("host-b", "nstat", "-az", "UdpRcvbufErrors"))[0])

    def _wait_for_port(self) -> None:
        for _ in range(200):
            if ":5201" in self.run("host-b", "ss", "-Hltn"):
                return
        raise AssertionError("iperf3 does not listen")

    def _namespace(self) -> int:
        process = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        return process.pid

    def _attach(self, side: str, prefix: str, other: str, gateway: str) -> None:
        host, router = self.pids[f"host-{side}"], self.pids[f"router-{side}"]
        with open_netlink(host) as netlink:
            netlink.link("set", index=1, state="up")
            netlink.link("add", ifname="eth0", kind="veth", peer={"ifname": "lan", "net_ns_pid": router})
            index = netlink.link_lookup(ifname="eth0")[0]
            netlink.addr("add", index=index, address=f"{prefix}.2", prefixlen=24)
            netlink.link("set", index=index, state="up")
        with open_netlink(router) as netlink:
            index = netlink.link_lookup(ifname="lan")[0]
            netlink.addr("add", index=index, address=f"{prefix}.1", prefixlen=24)
            netlink.link("set", index=index, state="up")
            netlink.route("add", dst=other, gateway=gateway)
        with open_netlink(host) as netlink:
            netlink.route("add", dst="default", gateway=f"{prefix}.1")
        with network_namespace_of(router):
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
