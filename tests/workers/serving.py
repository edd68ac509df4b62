"""What the tests of wire, roles and gateway share: clusters, a TCP relay between two workers, waiting for a state."""

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

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


class Relay:
    """A real TCP relay in front of a port: limits the rate, pauses, spoils or cuts what goes through.

    `rate_bytes_per_s` and `pause` act on what the dialler sends; `spoil_at` flips one bit of that byte (counted over
    the connection) on every connection made after it was set. `back_bytes_per_s` acts on what it is answered, `held` on
    what the dialler of that port sends.
    """

    def __init__(self, target_port: int = 0, buffer_bytes: int = 128 << 10) -> None:
        """`buffer_bytes`: what waits in the relay itself, which the sender takes for arrived."""
        self._target_port = target_port
        self._buffer_bytes = buffer_bytes
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._both_ways = False
        self.rate_bytes_per_s: float | None = None
        self.back_bytes_per_s: float | None = None
        self.held: int | None = None
        self.spoil_at: int | None = None
        self.port = 0
        self.forwarded = 0

    async def __aenter__(self) -> Self:
        # a small receive buffer, so that what the relay holds back stays visible to the sender
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_bytes)
        listener.bind(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=min(16 << 10, self._buffer_bytes))
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._flowing.set()
        self._server.close()
        self.cut()

    def aim(self, port: int) -> None:
        self._target_port = port

    def pause(self, both_ways: bool = False) -> None:
        """Hold what the dialler sends, until `resume`; with `both_ways` also what it is answered, an end among it."""
        self._both_ways = both_ways
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def cut(self, dialler_port: int | None = None) -> None:
        """Reset every connection, or the one that was dialled from a port."""
        pairs = list(zip(self._writers[::2], self._writers[1::2], strict=True))
        for pair in pairs:
            if dialler_port in (None, pair[0].get_extra_info("peername")[1]):
                for writer in pair:
                    self._writers.remove(writer)
                    with suppress(Exception):
                        writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        self._writers += [writer, far_writer]
        with suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(
                self._pump(reader, far_writer, shaped=True), self._pump(far_reader, writer, shaped=False)
            )

    def _dialler_of(self, far_writer: asyncio.StreamWriter) -> int:
        port: int = self._writers[self._writers.index(far_writer) - 1].get_extra_info("peername")[1]
        return port

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, shaped: bool) -> None:
        carried = 0
        due = time.monotonic()
        while data := await reader.read(16 << 10):
            rate = self.rate_bytes_per_s if shaped else self.back_bytes_per_s
            if shaped:
                await self._flowing.wait()
                while self.held is not None and self.held == self._dialler_of(writer):
                    await asyncio.sleep(0.01)
            if rate is not None:
                due = max(due, time.monotonic()) + len(data) / rate
                await asyncio.sleep(due - time.monotonic())
            if shaped:
                if self.spoil_at is not None and carried <= self.spoil_at < carried + len(data):
                    spoilt = bytearray(data)
                    spoilt[self.spoil_at - carried] ^= 1
                    data = bytes(spoilt)
                self.forwarded += len(data)
            carried += len(data)
            if self._both_ways:
                await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        if self._both_ways:
            await self._flowing.wait()
        writer.close()


class SlowWan:
    """An in-process cluster with relays on the way from prefill to each decode, and between those two.

    `rate_bytes_per_s` holds for KV on its way to main decode; `fabric` and `ids` are free until a test slows them.
    """

    def __init__(self, loaded: LoadedModel, directory: Path, rate_bytes_per_s: float | None, **layout: Any) -> None:
        self._loaded = loaded
        self._directory = directory
        self._layout = layout
        self._rate = rate_bytes_per_s
        self.wan, self.fabric, self.ids = Relay(), Relay(), Relay()
        self._ways = {("p0", "md0"): self.wan, ("p0", "rld0"): self.fabric, ("rld0", "md0"): self.ids}

    async def __aenter__(self) -> Self:
        for relay in self._ways.values():
            await relay.__aenter__()
        reroute = {way: relay.port for way, relay in self._ways.items()}
        self.cluster = InProcessCluster(self._loaded, Layout(reroute=reroute, **self._layout), self._directory)
        for (_, target), relay in self._ways.items():
            relay.aim(self.cluster.port(target))
        await self.cluster.__aenter__()
        self.wan.rate_bytes_per_s = self._rate
        self.p0, self.rld0, self.md0 = (self.cluster.worker(name) for name in ("p0", "rld0", "md0"))
        self.http = httpx.AsyncClient(base_url=self.cluster.base_url, timeout=30)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        await self.cluster.__aexit__(None, None, None)
        for relay in self._ways.values():
            await relay.__aexit__()

    @property
    def workers(self) -> tuple[Any, ...]:
        return self.p0, self.rld0, self.md0

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


def prompt_of(length: int, vocab: int = 258, seed: int = 0) -> list[int]:
    """A prompt of printable bytes (or of low ids of a larger vocabulary) without a repeating pattern."""
    low, span = (32, 95) if vocab < 1000 else (100, 4000)
    state, ids = seed + 1, []
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        ids.append(low + (state >> 33) % span)
    return ids
