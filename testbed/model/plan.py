"""Plan of a lab: a topology file with every default filled in, immutable.

Owns the runtime types only. `schema` says what a file may contain, `resolve` turns one into the other.
"""

from dataclasses import dataclass, field
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path
from typing import Any

from testbed.model.impairment import Impairment
from testbed.model.scale import Scale
from testbed.model.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Publish:
    """A host's TCP port made reachable from the machine: listen address and port, port inside the lab."""

    listen_address: str
    listen_port: int
    host_port: int


@dataclass(frozen=True, slots=True)
class HostPlan:
    """One host. Exactly one of `role` and `command` may be set; neither means a plain host."""

    name: str
    datacenter: str
    address: IPv4Interface
    port: int  # where the worker of this host listens, also for `command:` hosts (informative)
    role: str | None = None  # gateway | prefill | relay-decode | main-decode
    command: str | None = None
    device: str = "cpu"
    profile: str = "native"
    pace: tuple[tuple[str, Any], ...] = ()  # handed to the worker unread, as PDDBED_PROFILE; empty: no pacing
    affinity: tuple[int, ...] = ()  # CPU numbers; empty: all
    quota: float | None = None  # CPUs; 0.5 is "50%"
    publish: tuple[Publish, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class DatacenterPlan:
    """One datacenter: a switch, its hosts, and a border router that owns `router_address`."""

    name: str
    subnet: IPv4Network
    router_address: IPv4Interface
    hosts: tuple[HostPlan, ...]
    switch: str = "linux-bridge"  # or "ovs"
    fabric_mtu: int = 9000
    fabric_rate_bps: int | None = None
    fabric_delay_ns: int = 0


@dataclass(frozen=True, slots=True)
class WanPlan:
    """One WAN link between the border routers of datacenters `a` and `b`; forward is a to b."""

    name: str
    a: str
    b: str
    address_a: IPv4Interface  # of a's border router on this link, e.g. 172.31.0.0/31
    address_b: IPv4Interface
    forward: Impairment
    backward: Impairment
    driver: str = "auto"  # auto | netem | userspace
    mtu: int = 1500
    congestion: str = "cubic"
    initial_window: int = 10  # segments
    cost: int = 1

    @property
    def rtt_ns(self) -> int:
        """Propagation both ways, without serialization and queueing."""
        return self.forward.delay_ns + self.backward.delay_ns


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """Route from `datacenter` to `destination`: the WAN links in order (cheapest total cost), and their sums."""

    datacenter: str
    destination: str
    links: tuple[str, ...]
    rtt_ns: int
    rate_bps: int | None  # the slowest link, datacenter to destination
    mtu: int


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """The deployment that a lab stands for. Everything else of the plan is the lab's own."""

    scale: Scale
    deployment_kv_bytes: int  # a token
    lab_kv_bytes: int
    block_tokens: int  # the deployment's

    @property
    def byte_ratio(self) -> float:
        """The deployment's KV of a prompt over the lab's."""
        return self.scale.byte_ratio(self.deployment_kv_bytes, self.lab_kv_bytes)


@dataclass(frozen=True, slots=True)
class LabPlan:
    """A whole lab, ready to build."""

    name: str
    seed: int
    file: Path | None
    datacenters: tuple[DatacenterPlan, ...]
    wans: tuple[WanPlan, ...]
    routes: tuple[RoutePlan, ...]
    model: dict[str, Any]  # handed to the workers unread
    serving: dict[str, Any]  # handed to the workers unread
    api_address: str = "127.0.0.1"
    api_port: int = 8000
    api: dict[str, Any] = field(default_factory=dict)  # the API's names and limits, handed to the gateway unread
    congestion: Timeline | None = None  # begins when the lab is up
    scale: ScalePlan | None = None

    @property
    def hosts(self) -> tuple[HostPlan, ...]:
        return tuple(host for datacenter in self.datacenters for host in datacenter.hosts)
