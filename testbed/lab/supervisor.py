"""The lab's supervisor, a child of the lab's PID 1: builds the network, starts processes, serves the control socket.

Everything it makes lives in the sandbox, so its death, however it comes, takes the whole lab with it.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from testbed.lab import network as lab_network
from testbed.lab import reachability
from testbed.lab.control import ControlServer, Reply
from testbed.lab.environment import hosts_file
from testbed.lab.processes import HostProcesses, StartError
from testbed.lab.publish import publish
from testbed.lab.record import Record
from testbed.lab.wan import WanControl
from testbed.links.base import LinkError
from testbed.netns import netlink_in
from testbed.topology.plan import LabPlan

WORKER_PATIENCE_S = 300.0  # importing torch alone takes 20 s on an emulated CPU


@dataclass(frozen=True, slots=True)
class Settings:
    """How a lab is to be started, beyond its plan."""

    driver: str  # netem | userspace, for links whose file says auto
    with_workers: bool
    api: socket.socket | None  # listening, opened on the machine, for the gateway
    published: Mapping[str, Sequence[tuple[socket.socket, int]]]  # host -> (listening socket, port in the host)
    started_fd: int  # where progress and the outcome are reported, one JSON object a line


class Supervisor:
    """One lab while it runs."""

    def __init__(self, plan: LabPlan, record: Record, settings: Settings) -> None:
        self._plan = plan
        self._record = record
        self._settings = settings
        self._network: lab_network.Network | None = None
        self._processes: HostProcesses | None = None
        self._measured_rtt_ns: dict[str, int] = {}
        self._stop = threading.Event()
        self._began = time.monotonic()
        self._api_url = _api_url(settings)

    def run(self) -> int:
        """Build, report, serve until told to stop. The result is the process's exit status."""
        try:
            self._build()
        except Exception as error:
            self._report(event="failed", error=_sentence(error))
            if not isinstance(error, LinkError | StartError | reachability.Unreachable):
                raise
            return 1
        self._record.write_state(self._state())
        server = ControlServer(self._record.control_socket, self._handle)
        self._report(event="up", seconds=round(time.monotonic() - self._began, 3), state=self._state())
        os.close(self._settings.started_fd)
        signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        self._serve()
        del server
        return 0

    def _build(self) -> None:
        with netlink_in(os.getpid()) as ip:
            ip.link("set", index=1, state="up")
        self._processes = HostProcesses(self._plan, self._record, self._node_pid)
        if self._settings.with_workers:
            self._processes.warm_up()
        self._report(
            event="step",
            text=f"building {len(self._plan.hosts)} hosts in {len(self._plan.datacenters)} datacenters",
        )
        self._network = lab_network.build(self._plan, self._settings.driver, self._record.directory / "logs")
        self._report(event="step", text="waiting until every path forwards")
        self._control = WanControl(self._plan, self._network.links)
        self._measured_rtt_ns = reachability.wait_until_reachable(_paths(self._plan, self._network))
        if self._settings.with_workers:
            api_fd = self._settings.api.fileno() if self._settings.api else None
            self._processes.start(api_fd, lambda text: self._report(event="step", text=text), WORKER_PATIENCE_S)
        for host in self._plan.hosts:
            if host.name in self._settings.published:
                publish(
                    host.name,
                    self._node_pid(host.name),
                    str(host.address.ip),
                    self._settings.published[host.name],
                )
        if self._settings.api:
            self._settings.api.close()  # the gateway holds it; without one, connections are refused, not left waiting

    def _serve(self) -> None:
        assert self._processes is not None
        assert self._network is not None
        while not self._stop.is_set():
            self._processes.watch(0.2) if self._processes.by_host else self._stop.wait(0.2)
        self._network.close()

    def _node_pid(self, name: str) -> int:
        """A process in the namespaces of a host, a datacenter's router (`router.DC`) or a WAN link's node."""
        assert self._network is not None
        routers = {f"router.{datacenter}": node for datacenter, node in self._network.routers.items()}
        nodes = {**self._network.wan_nodes, **routers, **self._network.hosts}
        if name not in nodes:
            raise LookupError(f'no host "{name}" in this lab; there are: {", ".join([*self._network.hosts, *routers])}')
        pid: int = nodes[name].pid
        return pid

    def _handle(self, request: dict[str, Any]) -> Reply:
        """One control request, in a thread of its own."""
        match request.get("op"):
            case "status":
                return self._status(), []
            case "enter":
                pid = self._node_pid(request["host"])
                kinds = ("user", "pid", "net", "mnt")
                fds = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds]
                return {"namespaces": kinds}, fds
            case "wan-show":
                return {"links": self._control.show()}, []
            case "wan-set":
                link = self._control.set(request["link"], request["direction"], request["values"])
                return {"link": link}, []
            case "wan-reset":
                names = [request["link"]] if request["link"] else [wan.name for wan in self._plan.wans]
                return {"links": [self._control.reset(name) for name in names]}, []
            case "down":
                self._stop.set()
                return {}, []
            case other:
                raise ValueError(f"the lab knows no operation {other!r}; is it of another pddbed version?")

    def _state(self) -> dict[str, Any]:
        """What everybody may know without asking the lab: no secret in it."""
        return {
            "name": self._plan.name,
            "file": str(self._plan.file) if self._plan.file else None,
            "driver": self._settings.driver,
            "api": self._api_url,
            "model": self._plan.model.get("name"),
            "workers": self._settings.with_workers,
            "started": time.time(),
            "hosts": len(self._plan.hosts),
            "measured": [
                {
                    "name": wan.name,
                    "asked_rtt_ms": wan.rtt_ns / 1e6,
                    "rtt_ms": self._measured_rtt_ns[wan.name] / 1e6,
                }
                for wan in self._plan.wans
            ],
        }

    def _status(self) -> dict[str, Any]:
        assert self._processes is not None
        processes = self._processes.snapshot()
        links = [{**link, "measured_rtt_ns": self._measured_rtt_ns[link["name"]]} for link in self._control.show()]
        hosts = [
            {
                "name": host.name,
                "datacenter": host.datacenter,
                "role": host.role,
                "command": host.command,
                "address": str(host.address.ip),
                "port": host.port,
                **processes.get(host.name, {"pid": None, "state": "idle", "exit_status": None}),
            }
            for host in self._plan.hosts
        ]
        return {
            **self._record.state(),
            "uptime_s": time.monotonic() - self._began,
            "hosts": hosts,
            "links": links,
        }

    def _report(self, **event: Any) -> None:
        line = json.dumps(event).encode() + b"\n"
        with suppress(OSError):  # the starting command is gone; the guardian ends this lab
            os.write(self._settings.started_fd, line)


def _paths(plan: LabPlan, network: lab_network.Network) -> list[reachability.Path]:
    """Host to its router, router to router over each WAN link, and host to host across datacenters."""
    paths = [
        reachability.Path(host.name, network.hosts[host.name].pid, str(datacenter.router_address.ip), 0)
        for datacenter in plan.datacenters
        for host in datacenter.hosts
    ]
    for wan in plan.wans:
        pid = network.routers[wan.a].pid
        paths.append(reachability.Path(wan.name, pid, str(wan.address_b.ip), wan.rtt_ns))
    datacenters = {datacenter.name: datacenter for datacenter in plan.datacenters}
    for route in plan.routes:
        sources, targets = datacenters[route.datacenter].hosts, datacenters[route.destination].hosts
        if sources and targets:
            name = f"{sources[0].name} -> {targets[0].name}"
            paths.append(
                reachability.Path(name, network.hosts[sources[0].name].pid, str(targets[0].address.ip), route.rtt_ns)
            )
    return paths


def _api_url(settings: Settings) -> str | None:
    if settings.api is None or not settings.with_workers:
        return None
    address, port = settings.api.getsockname()[:2]
    return f"http://{'127.0.0.1' if address == '0.0.0.0' else address}:{port}"


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, LinkError | StartError | reachability.Unreachable) else repr(error)


def write_hosts_file(plan: LabPlan, record: Record) -> None:
    """Before the sandbox starts: the file that becomes the lab's /etc/hosts."""
    record.hosts_file.write_text(hosts_file(plan))
