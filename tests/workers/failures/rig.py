"""A cluster of real processes with a proxy on every way between them, and what its faults are made of.

The proxies run on a loop of their own, so that the cluster lives on between two tests.
"""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from tests.workers.failures.ways import Way
from tests.workers.serving import records_in
from workers.local import Layout, LocalCluster
from workers.wire.peers import RANK

T = TypeVar("T")

WITHIN_S = 60.0  # whatever a test waits for comes sooner, or never
PATIENCE = 0.1  # deadlines of 15 s become 1.5 s
Hosts = tuple[tuple[str, str, str], ...]
HOSTS = Layout().hosts
WORKERS = ("p0", "rld0", "md0")


class Answer:
    """What a streaming client has seen so far."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.instances: list[str] = []
        self.error: dict[str, Any] | None = None
        self.status = 0
        self.request_id = ""

    def from_(self, instance: str) -> int:
        return self.instances.count(instance)


class Rig:
    """The cluster, its ways, and faults. A context manager."""

    def __init__(
        self,
        directory: Path,
        serving: dict[str, Any],
        hosts: Hosts = HOSTS,
        send_buffer: int | None = None,
        patience: float = PATIENCE,
        **layout: Any,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()
        self.ways = {
            (near, far): Way() for near, role, _ in hosts for far, other, _ in hosts if RANK[role] < RANK[other]
        }
        self.directory = directory
        self._serving = serving
        self.roles = {name: role for name, role, _ in hosts}
        self._send_buffer = send_buffer
        self._patience = patience
        self._layout = {"hosts": hosts, **layout}

    def run(self, work: Coroutine[Any, Any, T], within_s: float = 2 * WITHIN_S) -> T:
        """Run a coroutine on the proxies' loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(within_s)

    def __enter__(self) -> Self:
        self._faults: set[tuple[str, str]] = set()
        reroute = {way: self.run(proxy.open()) for way, proxy in self.ways.items()}
        more = self._layout.pop("extra", {})
        extra = {host: {"PDDBED_PATIENCE": str(self._patience), **more.get(host, {})} for host in self.roles}
        serving = {"relay_threshold": 1, **self._serving}
        layout = Layout(serving=serving, reroute=reroute, extra=extra, **self._layout)
        self.cluster = LocalCluster(layout, self.directory)
        for (_, target), proxy in self.ways.items():
            proxy.aim(self.cluster.port(target))
        if self._send_buffer is not None:  # of the gateway towards its clients
            self.cluster.listener("gw0").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer)
        self.cluster.__enter__()
        # One client: each costs a TLS context, which these tests would notice. A connection for each request: tests
        # stop and cut what is behind it.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.AsyncClient(base_url=self.cluster.base_url, timeout=WITHIN_S, verify=False, limits=limits)
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.http.aclose())
        self.cluster.close()
        for proxy in self.ways.values():
            self.run(proxy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- faults ------------------------------------------------------------------------------------------------

    def ways_of(self, host: str) -> list[Way]:
        return [proxy for way, proxy in self.ways.items() if host in way]

    async def fault(self, kind: str, host: str) -> None:
        """Kill, stop, cut off or half-open a worker."""
        self._faults.add((kind, host))
        if kind == "kill":
            self.cluster.kill(host)
        elif kind == "stop":
            os.kill(self.cluster.pids[host], signal.SIGSTOP)
        for proxy in self.ways_of(host):
            if kind == "kill":
                proxy.reset()
            elif kind == "cut":
                proxy.cut()
            elif kind == "half-open":
                proxy.freeze()

    async def heal(self) -> None:
        """The opposite of all faults so far; killed workers are started anew, with the same addresses."""
        while self._faults:
            kind, host = self._faults.pop()
            if kind == "kill":
                await asyncio.to_thread(self.cluster.restart, host)
            elif kind == "stop":
                os.kill(self.cluster.pids[host], signal.SIGCONT)
        for proxy in self.ways.values():
            proxy.mend()

    # -- clients -----------------------------------------------------------------------------------------------

    async def stream(self, answer: Answer, prompt: list[int], max_tokens: int, **fields: Any) -> Answer:
        """A streamed greedy answer into `answer`, which others may look at meanwhile."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        async with self.http.stream("POST", "/v1/completions", json={**body, **fields}) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                answer.error = json.loads(await response.aread())["error"]
                return answer
            async for line in response.aiter_lines():
                if not line or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    answer.error = chunk["error"]
                    continue
                answer.request_id = chunk["id"]
                pdd = chunk["pdd"]
                assert pdd["position"] == len(prompt) + len(answer.ids), "a gap or a repetition"
                answer.ids += pdd["token_ids"]
                answer.instances += [pdd["instance"]] * len(pdd["token_ids"])
        return answer

    async def until(self, condition: Callable[[], bool], what: str, within_s: float = WITHIN_S) -> None:
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, f"not within {within_s} s: {what}"
            await asyncio.sleep(0.005)

    async def metrics(self) -> list[str]:
        return (await self.http.get("/metrics")).text.splitlines()

    async def noticed(self, host: str) -> None:
        """The gateway has noticed that a worker is gone."""
        end = time.monotonic() + WITHIN_S
        while not any(
            line.startswith("pddbed_worker_up") and host in line and float(line.split()[-1]) == 0
            for line in await self.metrics()
        ):
            assert time.monotonic() < end, f"{host} is not lost within {WITHIN_S} s"
            await asyncio.sleep(0.02)

    async def released(self) -> None:
        """No worker that is there uses a block for a request."""
        end = time.monotonic() + WITHIN_S
        while True:
            metrics = await self.metrics()
            used = [line.split()[-1] for line in metrics if line.startswith("pddbed_kv_blocks") and "used" in line]
            if set(map(float, used)) <= {0.0}:
                return
            assert time.monotonic() < end, f"blocks in use after {WITHIN_S} s: {used}"
            await asyncio.sleep(0.05)

    async def whole(self) -> None:
        """Every worker is connected again."""
        end = time.monotonic() + WITHIN_S
        while True:
            up = [float(line.split()[-1]) for line in await self.metrics() if line.startswith("pddbed_worker_up")]
            if all(up) and (await self.http.get("/health")).status_code == 200:
                return
            assert time.monotonic() < end, f"not whole within {WITHIN_S} s"
            await asyncio.sleep(0.05)

    async def settled(self) -> None:
        """Every worker is connected and whole, no request is unsettled, and no block used but by the caches."""
        end = time.monotonic() + WITHIN_S
        state = ""
        while time.monotonic() < end:
            health = await self.http.get("/health")
            metrics = await self.metrics()
            used = [line.split()[-1] for line in metrics if line.startswith("pddbed_kv_blocks") and "used" in line]
            idle = "pddbed_requests_running 0.0" in metrics
            workers = len(self.cluster.pids) - 1
            if health.status_code == 200 and idle and len(used) == workers and set(map(float, used)) == {0.0}:
                return
            state = f"health {health.text}, blocks used {used}, idle {idle}"
            await asyncio.sleep(0.05)
        raise AssertionError(f"not settled within {WITHIN_S} s: {state}")

    def record(self, request_id: str) -> dict[str, Any]:
        """The one line that a request left. Its client has the answer's end a moment before it is written."""
        end = time.monotonic() + 5
        while True:
            records = [record for record in records_in(self.cluster.records) if record["request_id"] == request_id]
            if records or time.monotonic() > end:
                break
            time.sleep(0.01)  # the gateway is another process
        (record,) = records
        return record

    def check_books(self) -> None:
        """No engine has found its pool's books wrong (it looks whenever it is idle), and no task died of a bug."""
        for host in self.roles:
            log = self.cluster.log(host).read_text(errors="replace")
            assert "Traceback" not in log, f"{host}:\n{log[-4000:]}"
