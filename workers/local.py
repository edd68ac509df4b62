"""A whole cluster on loopback: for tests, and for people without root. No lab, no namespaces, no emulated WAN.

`LocalCluster` runs real processes born of the fork server; `InProcessCluster` runs the same roles on one event loop,
so that a test can look into their pools. `python -m workers.local` serves until Ctrl-C.
"""

import argparse
import array
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from workers.environment import read_environment
from workers.gateway.server import Gateway
from workers.models import LoadedModel
from workers.process import make
from workers.roles.worker import Worker
from workers.spawning import Answer, Exited, Failed, Ready, Spawn, Spawned, decode_answer, encode

START_S = 120.0
STOP_S = 10.0
RESTARTS, RESTART_WINDOW_S = 3, 60.0  # of one process, by `watch`


class ClusterError(Exception):
    """The cluster did not come up; one sentence and the logs' tail."""


@dataclass(frozen=True)
class Layout:
    """A cluster to run: hosts with role and datacenter, model, serving settings, and what differs per host.

    `reroute` maps (from host, to host) to a port: where `from` looks for `to`, such as a proxy's.
    """

    model: Mapping[str, Any] = field(default_factory=lambda: {"name": "tiny"})
    serving: Mapping[str, Any] = field(default_factory=dict)
    hosts: tuple[tuple[str, str, str], ...] = (
        ("gw0", "gateway", "main"),
        ("p0", "prefill", "main"),
        ("rld0", "relay-decode", "main"),
        ("md0", "main-decode", "remote"),
    )
    reroute: Mapping[tuple[str, str], int] = field(default_factory=dict)
    extra: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    kv_bytes: int = 64 << 20
    wan_rtt_ns: int = 0


class Plan:
    """Sockets and environments of a layout."""

    def __init__(self, layout: Layout, records: Path, api: tuple[str, int]) -> None:
        self.layout = layout
        self.sockets = {
            name: socket.create_server(api if role == "gateway" else ("127.0.0.1", 0), backlog=512)
            for name, role, _ in layout.hosts
        }
        self._ports = {name: sock.getsockname()[1] for name, sock in self.sockets.items()}
        self.secret = secrets.token_hex(32)
        self.records = records

    def port(self, name: str) -> int:
        return self._ports[name]

    def environment(self, host: str) -> dict[str, str]:
        """PDDBED_* of one host."""
        layout = self.layout
        role, datacenter = next((role, dc) for name, role, dc in layout.hosts if name == host)
        peers = [
            {
                "name": name,
                "role": peer_role,
                "datacenter": peer_datacenter,
                "address": "127.0.0.1",
                "port": layout.reroute.get((host, name), self.port(name)),
            }
            for name, peer_role, peer_datacenter in layout.hosts
        ]
        others = {dc for _, _, dc in layout.hosts} - {datacenter}
        return {
            "PDDBED_LAB": "local",
            "PDDBED_HOST": host,
            "PDDBED_ROLE": role,
            "PDDBED_ADDRESS": "127.0.0.1",
            "PDDBED_PORT": str(self.port(host)),
            "PDDBED_PEERS": json.dumps(peers),
            "PDDBED_DATACENTER": datacenter,
            "PDDBED_SECRET": self.secret,
            "PDDBED_MODEL": json.dumps(dict(layout.model)),
            "PDDBED_SERVING": json.dumps(dict(layout.serving)),
            "PDDBED_WAN": json.dumps({dc: {"rtt_ns": layout.wan_rtt_ns, "rate_bps": None} for dc in others}),
            "PDDBED_RECORDS": str(self.records),
            "PDDBED_KV_BYTES": str(layout.kv_bytes),
            **layout.extra.get(host, {}),
        }


class InProcessCluster:
    """The roles as objects on the running event loop, with real sockets between them."""

    def __init__(self, loaded: LoadedModel, layout: Layout, records: Path) -> None:
        self._plan = Plan(layout, records, ("127.0.0.1", 0))
        self.loaded = loaded
        self.hosts: dict[str, Any] = {
            name: make(read_environment(self._plan.environment(name)), loaded) for name, _, _ in layout.hosts
        }
        self.records = records

    def port(self, name: str) -> int:
        """The port of a host."""
        return self._plan.port(name)

    @property
    def gateway(self) -> Gateway:
        return next(host for host in self.hosts.values() if isinstance(host, Gateway))

    @property
    def base_url(self) -> str:
        name = next(name for name, host in self.hosts.items() if isinstance(host, Gateway))
        return f"http://127.0.0.1:{self._plan.port(name)}"

    def worker(self, name: str) -> Worker:
        """A role object that is not the gateway."""
        worker = self.hosts[name]
        assert isinstance(worker, Worker)
        return worker

    async def __aenter__(self) -> Self:
        workers = [name for name, host in self.hosts.items() if host is not self.gateway]
        try:
            for name in workers:
                await self.hosts[name].start(self._plan.sockets[name])
            gateway = next(name for name in self.hosts if name not in workers)
            await self.gateway.start(self._plan.sockets[gateway])
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in (self.gateway, *(host for host in self.hosts.values() if host is not self.gateway)):
            await host.close()


@dataclass(frozen=True, slots=True)
class Exit:
    """A process that ended while the cluster was up. `status`: exit code; negative: the signal that ended it."""

    host: str
    pid: int
    status: int

    def __str__(self) -> str:
        how = f"was ended by signal {-self.status}" if self.status < 0 else f"ended with status {self.status}"
        return f"{self.host} (pid {self.pid}) {how}"


class LocalCluster:
    """The roles as processes. A context manager; `pids` may be killed by a test."""

    def __init__(self, layout: Layout, directory: Path, api: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.layout = layout
        self.directory = directory
        self.records = directory / "records"
        self.pids: dict[str, int] = {}
        self.base_url = ""
        self._api = api
        self._exits: list[Exit] = []
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._plan: Plan | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def port(self, name: str) -> int:
        """The port on which a host listens, or will: known before anything is started."""
        return self._planned().port(name)

    def listener(self, name: str) -> socket.socket:
        """A host's listening socket, before it is started."""
        return self._planned().sockets[name]

    def _planned(self) -> Plan:
        if self._plan is None:
            self._plan = Plan(self.layout, self.records, self._api)
        return self._plan

    def close(self) -> None:
        """End every process of this cluster."""
        if self._control is not None:
            self._control.close()  # the fork server ends its children at EOF
            self._control = None
        if self._server is not None:
            try:
                self._server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._server.kill()  # its children die with it (PDEATHSIG)
                self._server.wait()
            self._server = None

    def kill(self, name: str) -> None:
        """SIGKILL one process; returns when it is gone."""
        process = psutil.Process(self.pids[name])
        process.kill()
        psutil.wait_procs([process], STOP_S)

    def restart(self, name: str) -> None:
        """Start a process that has ended anew, with the same address and environment. Raises ClusterError."""
        address = self._api[0] if self.role(name) == "gateway" else "127.0.0.1"
        self._planned().sockets[name] = socket.create_server((address, self.port(name)), backlog=512)
        self._await_ready(name, self._begin(name, restarted=True))

    def role(self, name: str) -> str:
        return next(role for host, role, _ in self.layout.hosts if host == name)

    def exits(self, within_s: float = 0.0) -> list[Exit]:
        """Processes that have ended since the last call; waits for a first one at most `within_s`.

        Raises ClusterError when the fork server has ended, and every process with it.
        """
        assert self._control is not None
        while select.select([self._control], [], [], 0.0 if self._exits else within_s)[0]:
            answer = self._receive()
            if isinstance(answer, Exited):
                self._note(answer)
        ended, self._exits = self._exits, []
        return ended

    def _note(self, ended: Exited) -> None:
        self._exits.append(Exit(ended.host, ended.pid, os.waitstatus_to_exitcode(ended.status)))

    def _start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        gateway = next(name for name, role, _ in self.layout.hosts if role == "gateway")
        host = self._api[0]
        self.base_url = f"http://{host}:{self.port(gateway)}"
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_S)
        environment = {
            **os.environ,
            "PDDBED_FORKSERVER_FD": str(theirs.fileno()),
            "PDDBED_MODEL": json.dumps(dict(self.layout.model)),
        }
        with theirs, self.log("forkserver").open("wb") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "workers.forkserver"],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        answer = self._receive()
        if not isinstance(answer, Ready):
            raise ClusterError(answer.message if isinstance(answer, Failed) else str(answer))
        ready = {name: self._begin(name) for name, _, _ in self.layout.hosts}
        for name, waiting in ready.items():
            self._await_ready(name, waiting)

    def _begin(self, name: str, *, restarted: bool = False) -> socket.socket:
        """Start one process on its planned socket; what it says when it is ready comes on the socket returned."""
        plan = self._planned()
        variable = "PDDBED_API_FD" if self.role(name) == "gateway" else "PDDBED_LISTEN_FD"
        ready, remote = socket.socketpair()
        ready.settimeout(START_S)
        listener = plan.sockets[name]
        with remote, listener:
            environment = {**plan.environment(name), "PDDBED_RESTARTED": str(int(restarted))}
            self._spawn(name, environment, {variable: listener, "PDDBED_READY_FD": remote})
        return ready

    def _await_ready(self, name: str, ready: socket.socket) -> None:
        with ready:
            if ready.recv(16) != b"ready\n":
                tail = self.log(name).read_text(errors="replace")[-2000:]
                raise ClusterError(f"{name} did not start; its log ends with:\n{tail}")

    def _spawn(self, name: str, environment: dict[str, str], sockets: dict[str, socket.socket]) -> None:
        assert self._control is not None
        request = Spawn(host=name, env=environment, log=str(self.log(name)), fd_env=list(sockets))
        fds = array.array("i", [sock.fileno() for sock in sockets.values()])
        self._control.sendmsg([encode(request)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        answer = self._receive()
        while isinstance(answer, Exited):  # of an earlier process
            self._note(answer)
            answer = self._receive()
        if not isinstance(answer, Spawned):
            raise ClusterError(f"{name} was not started: {answer.message if isinstance(answer, Failed) else answer}")
        self.pids[name] = answer.pid

    def _receive(self) -> Answer:
        assert self._control is not None
        data = self._control.recv(1 << 16)
        if not data:
            tail = self.log("forkserver").read_text(errors="replace")[-2000:]
            raise ClusterError(f"the fork server ended; its log ends with:\n{tail}")
        return decode_answer(data)


def watch(cluster: LocalCluster) -> None:
    """Start processes that end anew, and tell it on stderr. Raises ClusterError when one ends again and again."""
    ends: dict[str, list[float]] = {}
    while True:
        for ended in cluster.exits(within_s=1.0):
            now = time.monotonic()
            latest = ends[ended.host] = [at for at in ends.get(ended.host, []) if now - at < RESTART_WINDOW_S] + [now]
            if len(latest) > RESTARTS:
                log = cluster.log(ended.host).read_text(errors="replace")[-2000:]
                raise ClusterError(f"{ended} once more within {RESTART_WINDOW_S:.0f} s; its log ends with:\n{log}")
            print(f"pddbed: {ended}; it is started anew", file=sys.stderr, flush=True)
            cluster.restart(ended.host)


def main() -> int:
    """Serve on loopback until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m workers.local", description=main.__doc__)
    parser.add_argument("--model", default="tiny", help="a built-in model, a Hugging Face directory or a .gguf file")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for the workers that compute")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16")
    parser.add_argument("--pipeline", default="pdd", help="pdd, cdc-pd, idc-pd, prfaas or single")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--kv-bytes", type=int, default=512 << 20, help="KV pool of each worker")
    options = parser.parse_args()
    model = {"name": options.model, "device": options.device, "dtype": options.dtype}
    layout = Layout(model, {"pipeline": options.pipeline}, kv_bytes=options.kv_bytes)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="pddbed-local-") as directory:
        try:
            with LocalCluster(layout, Path(directory), ("127.0.0.1", options.port)) as cluster:
                print(f"serving {options.model} on {cluster.base_url} (Ctrl-C ends it)", flush=True)
                with suppress(KeyboardInterrupt):
                    watch(cluster)
        except (ClusterError, OSError) as error:
            print(f"pddbed: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
