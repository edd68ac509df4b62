"""The lab's supervisor, a child of the lab's PID 1: builds the network, starts processes, serves the control socket.

Everything it makes lives in the sandbox, so its death, however it comes, takes the whole lab with it.
"""

import errno
import json
import os
import resource
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.congestion.player import PlayError
from testbed.lab import network as lab_network
from testbed.lab.control import ControlServer
from testbed.lab.link_table import REFRESH_S, LinkTable
from testbed.lab.processes import HostProcesses, StartError
from testbed.lab.record import Record
from testbed.lab.troubles import Troubles
from testbed.lab.wan import WanControl
from testbed.links.base import LinkError
from testbed.machine.netns import netlink_in
from testbed.model.plan import LabPlan
from testbed.supervisor import operations, reachability
from testbed.supervisor.log_limit import VARIABLE, cut_logs, limit_bytes
from testbed.supervisor.publish import publish
from testbed.verify.verification import Verification

WORKER_PATIENCE_S = 300.0  # importing torch alone takes 20 s on an emulated CPU
LOOK_EVERY_S = 1.0  # for parts of the lab that have ended
LOGS_EVERY_S = 2.0  # between looks at how long the logs are
CUT = f"its older part is left out ({VARIABLE})"
SPARE_FILES = 32  # beside the two of each host
TOO_FEW_FILES = "the lab cannot be built: this process may not open as many files as it takes; raise it with ulimit -n"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a lab's start, beyond its plan."""

    driver: str  # netem | userspace, for links whose file says auto
    with_workers: bool
    api: socket.socket | None  # listening, opened on the machine, for the gateway
    published: Mapping[str, Sequence[tuple[socket.socket, int]]]  # host -> (listening socket, port in the host)
    verify: bool  # take the floor and run the quick verification
    started_fd: int  # where progress and the outcome are reported, one JSON object a line


class Supervisor:
    """Brings one lab up and stays with it."""

    def __init__(self, plan: LabPlan, record: Record, settings: Settings) -> None:
        self._plan = plan
        self._record = record
        self._settings = settings
        self._began = time.monotonic()
        self._look_again = 0.0
        self._lost_network: dict[str, str] = {}
        self._build_seconds = 0.0  # until every path forwarded
        self._api_url = _api_url(settings)

    def run(self) -> int:
        """Build, report, serve until told to stop. The result is the process's exit status."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        try:
            if most != resource.RLIM_INFINITY and most < 2 * len(self._plan.hosts) + SPARE_FILES:
                raise StartError(TOO_FEW_FILES)  # told here: a pty that cannot be opened does not say why
            lab = self._build()
            lab.state = self._state(lab)
            self._record.write_state(lab.state)
            lab.processes.on_exit = lambda: self._tell_losses(lab)
            self._tell_losses(lab)
            ControlServer(self._record.control_socket, lambda request: operations.answer(lab, request))
            if self._plan.congestion is not None:
                lab.congestion.play(self._plan.congestion)
        except Exception as error:
            self._report(event="failed", error=_sentence(error))
            if not isinstance(error, LinkError | StartError | PlayError | reachability.Unreachable):
                raise
            return 1
        self._report(event="up", seconds=round(time.monotonic() - self._began, 3), state=lab.state)
        os.close(self._settings.started_fd)
        signal.signal(signal.SIGTERM, lambda *_: lab.stop.set())
        self._stay(lab)
        lab.network.close()
        return 0

    def _stay(self, lab: operations.RunningLab) -> None:
        """Watch processes and logs until told to stop; what fails meanwhile is told, and does not end the lab."""
        log_bytes, troubles = limit_bytes(), lab.troubles
        looked = time.monotonic()

        def watch() -> None:
            lab.processes.watch(0.2) if lab.processes.by_host else lab.stop.wait(0.2)
            self._tell_losses(lab)

        def cut() -> None:
            cut_logs(self._record.logs, log_bytes, lambda name: troubles.note(f"log {name} was cut", CUT, claim=False))

        while not lab.stop.is_set():
            if not troubles.guard("watching the hosts' processes", watch):
                lab.stop.wait(0.2)  # not in a tight loop
            if time.monotonic() > looked + LOGS_EVERY_S:
                troubles.guard("keeping the logs short", cut)
                looked = time.monotonic()

    def _build(self) -> operations.RunningLab:
        plan = self._plan
        with netlink_in(os.getpid()) as ip:
            ip.link("set", index=1, state="up")
        processes = HostProcesses(plan, self._record)
        if self._settings.with_workers:
            processes.warm_up()
        self._step(f"building {len(plan.hosts)} hosts in {len(plan.datacenters)} datacenters")
        network = lab_network.build(plan, self._settings.driver, self._record.directory / "logs")
        troubles = Troubles(self._record.unwritten_file, [host.name for host in plan.hosts])
        table = LinkTable(self._record.links_file, plan)
        control = WanControl(plan, network.links, lambda rates: network.cap_super_packets(plan, rates), table.change)
        control.tell_rates()
        threading.Thread(target=_keep_fresh, args=(table, troubles), name="links now", daemon=True).start()
        verification = Verification(plan, network, control, self._record.results, troubles)
        measured = self._prove(network, control, verification)
        if self._settings.with_workers:
            processes.start(network.pid_of, self._gateways_api(), self._step, WORKER_PATIENCE_S)
        for host in plan.hosts:
            if host.name in self._settings.published:
                sockets = self._settings.published[host.name]
                publish(host.name, network.pid_of(host.name), str(host.address.ip), sockets, troubles.note)
        if self._settings.api and (not self._settings.with_workers or self._gateways_api() is None):
            self._settings.api.close()  # without a gateway connections are to be refused, not left waiting
        return operations.RunningLab(
            plan, self._record, network, processes, control, verification, measured, troubles, self._began
        )

    def _gateways_api(self) -> socket.socket | None:
        """The API's socket, if there is a gateway to hold it."""
        return self._settings.api if any(host.role == "gateway" for host in self._plan.hosts) else None

    def _prove(self, network: lab_network.Network, control: WanControl, verification: Verification) -> dict[str, int]:
        """Wait until every path forwards, and verify; returns the smallest round trip per WAN link, in ns.

        The floor is taken first, on links without impairment: a packet that is on a long link already would hold up
        every one behind it.
        """
        if self._settings.verify:
            control.take_away()
        self._step("waiting until every path forwards")
        measured = reachability.wait_until_reachable(_paths(self._plan, network))
        self._build_seconds = round(time.monotonic() - self._began, 3)
        if self._settings.verify:
            verification.measure_floor()
            control.reset_all()
            self._step("verifying the links")
            verification.run(quick=True)
            return {}  # those were round trips of the bare paths
        return measured

    def _state(self, lab: operations.RunningLab) -> dict[str, Any]:
        """State that everybody may know without asking the lab: no secret in it."""
        return {
            "name": self._plan.name,
            "file": str(self._plan.file) if self._plan.file else None,
            "driver": self._settings.driver,
            "api": self._api_url,
            "model": self._plan.model.get("name"),
            "workers": self._settings.with_workers and any(host.role for host in self._plan.hosts),
            "started": time.time(),
            "hosts": len(self._plan.hosts),
            "lost": {},
            "build_seconds": self._build_seconds,
            "verified": lab.verification.last,
            "applied": {link["name"]: link["applied"] for link in lab.wan.show()},
            "measured": [
                {"name": wan.name, "asked_rtt_ms": wan.rtt_ns / 1e6, "rtt_ms": lab.measured_rtt_ns[wan.name] / 1e6}
                for wan in self._plan.wans
                if wan.name in lab.measured_rtt_ns
            ],
        }

    def _tell_losses(self, lab: operations.RunningLab) -> None:
        """Keep what `ps` and others show without asking the lab up to date; the network is looked at once a second."""
        if time.monotonic() >= self._look_again:
            self._look_again = time.monotonic() + LOOK_EVERY_S
            self._lost_network = lab.network.lost()
        lost = {**lab.processes.lost(), **self._lost_network}
        if lost != lab.state["lost"]:
            lab.state["lost"] = lost
            with suppress(OSError):  # no room in /run; `status` knows it all the same
                self._record.write_state(lab.state)

    def _step(self, text: str) -> None:
        self._report(event="step", text=text)

    def _report(self, **event: Any) -> None:
        line = json.dumps(event).encode() + b"\n"
        with suppress(OSError):  # the starting command is gone; the guardian ends this lab
            os.write(self._settings.started_fd, line)


def _keep_fresh(table: LinkTable, troubles: Troubles) -> None:
    while True:
        time.sleep(REFRESH_S)
        troubles.guard("telling workers of the links", table.refresh)


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
    """Sentence of the error; of one that nobody expected also where it came from, since its log goes with the lab."""
    if isinstance(error, LinkError | StartError | PlayError | reachability.Unreachable):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return TOO_FEW_FILES
    frames = traceback.extract_tb(error.__traceback__)
    where = [frame for frame in frames if "testbed" in frame.filename][-1]  # not within some library
    place = f"{Path(where.filename).name}, line {where.lineno}"
    return f"the lab cannot be built: {error or type(error).__name__} ({type(error).__name__} in {place})"
