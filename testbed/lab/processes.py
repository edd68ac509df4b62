"""The processes of a lab's hosts: workers forked from one warm process, and `command:` hosts' programs.

Owns their start, readiness, logs and exit statuses. A gateway that fails is started anew: without it nobody can ask for
anything. A worker that ends is not, since an experiment that lost one has to see the loss; `ps` and `status` say how it
ended. Talks to the fork server as docs/environment.md says; knows
nothing of what a worker does.
"""

import json
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.lab import cgroups
from testbed.lab.environment import fitting, host_environment
from testbed.lab.record import Record
from testbed.machine.programs import environment, program
from testbed.model.plan import HostPlan, LabPlan
from workers import spawning
from workers.linux import CLONE_NEWNET, CLONE_NEWNS, die_with_parent, setns

PACED_NICENESS = -10  # a worker that holds its steps until they are due has to wake up in time
RESTARTS, RESTART_WINDOW_S = 3, 60.0  # of a gateway; one that fails more often stays down, and its API refuses
READY_FD, API_FD = "PDDBED_READY_FD", "PDDBED_API_FD"


class StartError(Exception):
    """A process did not come up; the message names the host and the last lines of its log."""


@dataclass
class HostProcess:
    """One host's process: `state` is starting, ready, running (no readiness signal) or exited."""

    host: HostPlan
    log: Path
    pid: int | None = None
    state: str = "starting"
    status: int | None = None  # exit code; negative: the signal that ended it
    restarted_at: list[float] = field(default_factory=list)
    # Of a command, kept: Python reaps the children of forgotten Popen objects whenever it starts another process.
    child: "subprocess.Popen[bytes] | None" = None


class HostProcesses:
    """Starts and watches every process of a lab. Methods are called from the supervisor's main thread."""

    def __init__(self, plan: LabPlan, record: Record) -> None:
        self._plan = plan
        self._record = record
        self._node_pid: Callable[[str], int] = lambda _: 0  # known when the network is built
        self._secret = os.urandom(32).hex()
        self._selector = selectors.DefaultSelector()
        self._forkserver: socket.socket | None = None
        self._forkserver_process: subprocess.Popen[bytes] | None = None
        self._forkserver_ready = False
        self._api: socket.socket | None = None
        self._started = False
        self.by_host: dict[str, HostProcess] = {}
        self.on_exit: Callable[[], None] = lambda: None
        """Called when a process has ended, or was started anew."""

    def warm_up(self) -> None:
        """Begin to load the model, while the network is being built."""
        if any(host.role for host in self._plan.hosts):
            self._start_forkserver()

    def start(
        self,
        node_pid: Callable[[str], int],
        api: socket.socket | None,
        progress: Callable[[str], None],
        patience_s: float,
    ) -> None:
        """After `warm_up`: start everything in its host's namespaces, and wait until it serves. Raises StartError.

        `api` is the gateway's listening socket, kept for the one that replaces it, and closed when nobody will.
        """
        self._node_pid = node_pid
        self._api = api
        workers = [host for host in self._plan.hosts if host.role]
        deadline = time.monotonic() + patience_s
        if workers:
            progress(f"loading model {self._plan.model.get('name')}")
            self._wait(lambda: self._forkserver_ready, deadline, "the model to load")
            progress(f"starting {len(workers)} workers")
            for host in workers:
                self._spawn(self._new_process(host))
        for host in self._plan.hosts:
            if host.command:
                self._run_command(host)
        self._wait(
            lambda: all(process.state != "starting" for process in self.by_host.values()),
            deadline,
            "the workers",
        )
        self._started = True

    def watch(self, timeout_s: float) -> None:
        """Handle what happened to the processes; returns after at most `timeout_s`."""
        for key, _ in self._selector.select(timeout_s):
            key.data()
        for process in self.by_host.values():
            status = process.child.poll() if process.child and process.state == "running" else None
            if status is not None:
                process.state, process.status = "exited", status
                self.on_exit()

    def environment_of(self, host: HostPlan) -> dict[str, str]:
        """The PDDBED_* variables of a host, for whatever runs on it."""
        return host_environment(self._plan, host, self._secret, str(self._record.results))

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """State by host name, for `status`. A process that was started anew keeps the status of its last end."""
        return {
            name: {
                "pid": process.pid,
                "state": process.state,
                "exit_status": process.status,
                "restarts": len(process.restarted_at),
            }
            for name, process in list(self.by_host.items())
        }

    def lost(self) -> dict[str, str]:
        """Ends of processes that are not there, by host name; not programs that are through with their work."""
        ended = [process for process in list(self.by_host.values()) if process.state == "exited"]
        ended = [process for process in ended if process.host.role or process.status]
        return {process.host.name: describe_exit(process.status) for process in ended}

    def _wait(self, done: Callable[[], bool], deadline: float, what: str) -> None:
        while not done():
            self.watch(0.2)
            for process in self.by_host.values():
                if process.state == "exited" and process.host.role:
                    raise StartError(
                        f"{process.host.role} {process.host.name} {describe_exit(process.status)}" + tail(process.log)
                    )
            if time.monotonic() > deadline:
                waiting = ", ".join(name for name, process in self.by_host.items() if process.state == "starting")
                raise StartError(f"gave up waiting for {what}" + (f" ({waiting})" if waiting else ""))

    # -- the fork server ------------------------------------------------------------------------------------------

    def _start_forkserver(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {
            **environment(),
            "PDDBED_FORKSERVER_FD": str(theirs.fileno()),
            "PDDBED_MODEL": json.dumps({**self._plan.model, "device": self._device()}),
        }
        with self._record.log("forkserver").open("ab") as log:
            self._forkserver_process = subprocess.Popen(
                program("workers.forkserver"),
                env=variables,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        theirs.close()
        self._forkserver = ours
        self._selector.register(ours, selectors.EVENT_READ, self._on_forkserver)

    def _device(self) -> str:
        """Device; the fork server says at once whether this machine has it; it loads to host memory all the same."""
        return next((host.device for host in self._plan.hosts if host.device != "cpu"), "cpu")

    def _on_forkserver(self) -> None:
        assert self._forkserver is not None
        try:
            data = self._forkserver.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self._lose_forkserver()
            return
        answer = spawning.decode_answer(data)
        if isinstance(answer, spawning.Ready):
            self._forkserver_ready = True
            return
        if isinstance(answer, spawning.Failed) and not self._started:
            raise StartError(answer.message)
        process = self.by_host.get(answer.host or "")
        if process is None:
            return
        match answer:
            case spawning.Spawned():
                process.pid = answer.pid
            case spawning.Exited():
                self._ended(process, os.waitstatus_to_exitcode(answer.status))
            case spawning.Failed():
                self._ended(process, None)

    def _ended(self, process: HostProcess, status: int | None) -> None:
        """A worker is gone. A gateway that was ready is started anew, unless it was asked to end or fails too often."""
        process.state, process.status = "exited", status
        if process.host.role == "gateway" and self._started and self._forkserver is not None:
            now = time.monotonic()
            recent = [at for at in process.restarted_at if now - at < RESTART_WINDOW_S]
            if status not in (0, None) and len(recent) < RESTARTS:
                process.restarted_at.append(now)
                self._spawn(process)
            elif self._api is not None:
                self._api.close()  # connections are to be refused, not left waiting
                self._api = None
        self.on_exit()

    def _lose_forkserver(self) -> None:
        assert self._forkserver is not None
        assert self._forkserver_process is not None
        self._selector.unregister(self._forkserver)
        status = self._forkserver_process.wait()
        self._forkserver = None
        for process in self.by_host.values():
            if process.host.role and process.state != "exited":
                process.state, process.status = "exited", None
        if self._api is not None:
            self._api.close()
            self._api = None
        self.on_exit()
        if not self._forkserver_ready:
            raise StartError(f"loading the model failed{tail(self._record.log('forkserver'), status)}")

    def _spawn(self, process: HostProcess) -> None:
        assert self._forkserver is not None
        host = process.host
        process.state = "starting"
        readable, writable = os.pipe()
        fds, fd_names = [writable], [READY_FD]
        if host.role == "gateway" and self._api is not None:
            fds.append(self._api.fileno())
            fd_names.append(API_FD)
        request = spawning.Spawn(
            host=host.name,
            env={**self.environment_of(host), "PDDBED_RESTARTED": str(int(bool(process.restarted_at)))},
            log=str(process.log),
            namespaces_of=self._node_pid(host.name),
            affinity=list(host.affinity) or None,
            cgroup=self._cgroup(host),
            nice=PACED_NICENESS if host.pace else 0,
            fd_env=fd_names,
        )
        socket.send_fds(self._forkserver, [spawning.encode(request)], fds)
        os.close(writable)
        self._selector.register(readable, selectors.EVENT_READ, lambda: self._on_ready(process, readable))

    def _on_ready(self, process: HostProcess, readable: int) -> None:
        if os.read(readable, 64):
            process.state = "ready"
        self._selector.unregister(readable)
        os.close(readable)

    # -- command: hosts -------------------------------------------------------------------------------------------

    def _run_command(self, host: HostPlan) -> None:
        assert host.command is not None
        process = self._new_process(host)
        own, left_out = fitting(self.environment_of(host))
        variables = {**os.environ, **own}
        for name in left_out:
            process.log.write_text(f"pddbed: {name} is not set, too long for the kernel in a lab of so many hosts\n")
        pid = self._node_pid(host.name)
        cgroup = self._cgroup(host)
        directory = self._plan.file.parent if self._plan.file else Path("/")

        def enter_host() -> None:
            if cgroup is not None:
                (Path(cgroup) / "cgroup.procs").write_text("0")
            if host.affinity:
                os.sched_setaffinity(0, host.affinity)
            network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
            mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
            setns(network, CLONE_NEWNET)
            setns(mounts, CLONE_NEWNS)
            with suppress(OSError):  # the file is not on disk: the command runs in /, where joining has put it
                os.chdir(directory)
            die_with_parent()

        with process.log.open("ab") as log:
            child = subprocess.Popen(
                ["/bin/sh", "-c", host.command],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=enter_host,
                start_new_session=True,
            )
        process.child, process.pid, process.state = child, child.pid, "running"

    def _new_process(self, host: HostPlan) -> HostProcess:
        process = HostProcess(host, self._record.host_log(host.name))
        process.log.touch()
        self.by_host[host.name] = process
        return process

    def _cgroup(self, host: HostPlan) -> str | None:
        return None if host.quota is None else str(cgroups.create(self._plan.name, host.name, host.quota))


def describe_exit(status: int | None) -> str:
    """`ended with status 1`, `was ended by signal 9`."""
    if status is None:
        return "ended"
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def tail(log: Path, status: int | None = None, lines: int = 12) -> str:
    """The end of a log, indented, for an error message."""
    try:
        text = log.read_text(errors="replace").strip().splitlines()[-lines:]
    except OSError:
        text = []
    head = "" if status is None else f" ({describe_exit(status)})"
    return head + "".join(f"\n    {line}" for line in text)
