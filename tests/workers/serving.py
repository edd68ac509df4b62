"""Helpers of the tests of roles and gateway: clusters with proxies between workers, requests, waiting for a state."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import pytest

from tests.workers.proxy import Proxy
from workers.local import InProcessCluster, Layout
from workers.models import LoadedModel

T = TypeVar("T")

DEADLINE_S = 60.0

TWO_OF_EACH = (
    ("gw0", "gateway", "main"),
    ("p0", "prefill", "main"),
    ("p1", "prefill", "main"),
    ("rld0", "relay-decode", "main"),
    ("rld1", "relay-decode", "main"),
    ("md0", "main-decode", "remote"),
    ("md1", "main-decode", "remote"),
)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run one test's coroutine; a hang is an error of its own."""

    async def limited() -> T:
        async with asyncio.timeout(DEADLINE_S):
            return await work

    return asyncio.run(limited())


async def eventually(condition: Callable[[], bool], within_s: float, what: str) -> float:
    """Wait for a condition; returns how long it took (s)."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < within_s, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.005)
    return time.monotonic() - start


class SlowWan:
    """An in-process cluster with proxies on the way from prefill to each decode, and between those two.

    `rate_bytes_per_s` holds for KV on its way to main decode; `fabric` and `ids` are free until a test slows them.
    """

    def __init__(self, loaded: LoadedModel, directory: Path, rate_bytes_per_s: float | None, **layout: Any) -> None:
        self._loaded = loaded
        self._directory = directory
        self._layout = layout
        self._rate = rate_bytes_per_s
        self.wan, self.fabric, self.ids = Proxy(), Proxy(), Proxy()
        self._ways = {("p0", "md0"): self.wan, ("p0", "rld0"): self.fabric, ("rld0", "md0"): self.ids}

    async def __aenter__(self) -> Self:
        for proxy in self._ways.values():
            await proxy.__aenter__()
        reroute = {way: proxy.port for way, proxy in self._ways.items()}
        self.cluster = InProcessCluster(self._loaded, Layout(reroute=reroute, **self._layout), self._directory)
        for (_, target), proxy in self._ways.items():
            proxy.aim(self.cluster.port(target))
        await self.cluster.__aenter__()
        self.wan.rate_bytes_per_s = self._rate
        self.p0, self.rld0, self.md0 = (self.cluster.worker(name) for name in ("p0", "rld0", "md0"))
        self.http = httpx.AsyncClient(base_url=self.cluster.base_url, timeout=30)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        await self.cluster.__aexit__(None, None, None)
        for proxy in self._ways.values():
            await proxy.__aexit__()

    @property
    def workers(self) -> tuple[Any, ...]:
        return self.p0, self.rld0, self.md0

    def records(self) -> list[dict[str, Any]]:
        """Records of the requests that all workers have let go of, in that order."""
        return records_in(self.cluster.records)

    async def settled(self, within_s: float = 20.0) -> list[dict[str, Any]]:
        """The records, once all workers have let go of all requests."""
        await eventually(lambda: not self.cluster.gateway.dispatcher.live, within_s, "all workers have reported")
        return self.records()

    async def complete(self, prompt: list[int] | str, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """A whole greedy answer. Fails the test on any status but 200."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        response = await self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def complete_after_relay(
        self, prompt: list[int], max_tokens: int, relayed: int, **fields: Any
    ) -> dict[str, Any]:
        """A whole answer of which the relay makes at least `relayed` tokens: the WAN stands still until it has."""
        self.wan.pause()
        asking = asyncio.create_task(self.complete(prompt, max_tokens, **fields))
        await eventually(
            lambda: any(len(active.answer) >= relayed for active in self.rld0.active.values()), 20, "the relay decodes"
        )
        self.wan.resume()
        return await asking

    def all_released(self) -> bool:
        """No request on any worker, and no block but the cache's, of which none is pinned."""
        return all(
            not w.active and w.pool.free_count + len(w.cache) == w.pool.num_blocks and w.cache.policy.pinned == 0
            for w in self.workers
        )

    async def check_released(self, within_s: float = 1.0) -> None:
        """Everything is given back, soon, and the pools' books are right."""
        await eventually(self.all_released, within_s, "every worker has released everything")
        for worker in self.workers:
            worker.cache.check_integrity()
            worker.pool.check_integrity(holders=[worker.cache.blocks])


class Served:
    """A cluster for all tests of a module, driven synchronously. A context manager; at its end all is given back."""

    release_within_s = 1.0

    def __init__(self, loaded: LoadedModel, directory: Path) -> None:
        self.wan = SlowWan(loaded, directory, None)

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        self._runner.run(self.wan.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        with self._runner:
            self._runner.run(self.wan.check_released(self.release_within_s))
            self._runner.run(self.wan.__aexit__())

    def post(self, path: str, body: Any, raw: bytes | None = None) -> httpx.Response:
        content = json.dumps(body).encode() if raw is None else raw
        return self._runner.run(self.wan.http.post(path, content=content))

    def get(self, path: str) -> httpx.Response:
        return self._runner.run(self.wan.http.get(path))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        for _ in range(100):
            if condition():
                return
            self._runner.run(asyncio.sleep(0.03))
        pytest.fail(what)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a streamed answer; asserts the stream's form and its end."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


async def connect_without_reading(port: int, body: dict[str, object]) -> socket.socket:
    """Ask, and read nothing."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 10)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    await loop.sock_sendall(sock, head.encode() + data)
    return sock


def records_in(directory: Path) -> list[dict[str, Any]]:
    """The records of requests that a gateway has written."""
    return [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()]


def prompt_of(length: int, vocab: int = 258, seed: int = 0) -> list[int]:
    """A prompt of printable bytes (or of low ids of a larger vocabulary) without a repeating pattern."""
    low, span = (32, 95) if vocab < 1000 else (100, 4000)
    state, ids = seed + 1, []
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        ids.append(low + (state >> 33) % span)
    return ids
