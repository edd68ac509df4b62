"""Cost of the gateway for a streamed token: wire frame in, merged, turned into text and JSON, SSE out, to a client.

    python -m benchmarks.gateway [--tokens 3000] [--streams 16] [--out FILE]

A real gateway process is fed by a stand-in for prefill that speaks the real wire protocol and has every token ready, so
that nothing is computed but the gateway's own work. Two figures, each next to the same with a process in the gateway's
place that forwards the frames without looking at them ("nothing"):

- latency: one stream, a token every 2 ms; from when the source posts it to when the client has read its event;
- cost: many streams as fast as they go; CPU time of the process a token, all of it user and system.

Overhead is the difference. The two alternate, round by round; the best round of each counts: others share the machine.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks import harness
from workers.environment import read_environment
from workers.local import Layout, Plan
from workers.models import LoadedModel, ModelSpec, load_model
from workers.roles.announcements import local_facts
from workers.wire.codec import encode, kind_of
from workers.wire.frames import pack
from workers.wire.messages import Message, Prefill, Report, RequestSpec, Span, Status, Tokens
from workers.wire.peers import Peers

INTERVAL_S = 0.002
PROMPT = [65] * 16
LIMIT_MS = 0.3
LETTERS = list(range(97, 123))

NOTHING = """
import asyncio, sys
async def serve(reader, writer):
    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
    async def pump(source, sink):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
        sink.close()
    await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


class Source:
    """Stands in for prefill in a lab without decode workers: every token is ready at once, or when it is due."""

    def __init__(self) -> None:
        self.interval_s = 0.0
        self.posted_ns: list[int] = []
        self.peers: Peers
        self._tasks: set[asyncio.Task[None]] = set()

    def on_message(self, peer: str, message: Message) -> None:
        if isinstance(message, Prefill):
            task = asyncio.create_task(self.answer(message.spec))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def answer(self, spec: RequestSpec) -> None:
        now_ns = time.monotonic_ns()
        span = Span(name="prefill", start_ns=now_ns, end_ns=now_ns, tokens=len(spec.prompt))
        self.peers.post(spec.gateway, Report(request=spec.id, spans=[span]))
        async for message in self.tokens(spec.id, len(spec.prompt), spec.sampling.max_tokens):
            self.peers.post(spec.gateway, message)
        self.peers.post(spec.gateway, Report(request=spec.id, spans=[], done=True))

    async def tokens(self, request: str, position: int, count: int) -> AsyncIterator[Tokens]:
        """One message a token; the last one ends the answer."""
        due = time.monotonic()
        for index in range(count):
            if self.interval_s:
                due += self.interval_s
                await asyncio.sleep(due - time.monotonic())
            elif index % 8 == 0:
                await asyncio.sleep(0)  # decode steps of other requests would come between
            self.posted_ns.append(time.monotonic_ns())
            ends = "length" if index == count - 1 else None
            ids = [LETTERS[index % len(LETTERS)]]
            yield Tokens(request=request, position=position + index, ids=ids, finish_reason=ends)

    async def serve_raw(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The same frames to whoever connects and says how many."""
        count = int(await reader.readline())
        async for message in self.tokens("cmpl-" + "0" * 24, len(PROMPT), count):
            writer.write(pack(kind_of(message), encode(message)))
            await writer.drain()
        writer.close()

    def on_lost(self, peer: str, reason: str) -> None:
        pass

    def on_change(self) -> None:
        for name in self.peers.known:
            self.peers.post_if_up(name, self.status_for(name))

    def status_for(self, peer: str) -> Status:
        return Status(free_blocks=1, blocks=1, cached_blocks=0, requests=0, connected=[], counters=[])


@asynccontextmanager
async def gateway_process(loaded: LoadedModel, source: Source) -> AsyncIterator[tuple[psutil.Process, int]]:
    """A gateway whose only worker is `source`: its process and its port."""
    layout = Layout(serving={"pipeline": "single"}, hosts=(("gw0", "gateway", "main"), ("p0", "prefill", "main")))
    with tempfile.TemporaryDirectory(prefix="pddbed-bench-") as directory:
        plan = Plan(layout, Path(directory), ("127.0.0.1", 0))
        environment = read_environment(plan.environment("p0"))
        source.peers = Peers(local_facts(environment, loaded), environment.peers, source, None, 0)
        await source.peers.start(plan.sockets["p0"])
        ready, theirs = socket.socketpair()
        api = plan.sockets["gw0"]
        process = subprocess.Popen(
            [sys.executable, "-m", "workers"],
            env=os.environ
            | plan.environment("gw0")
            | {"PDDBED_API_FD": str(api.fileno()), "PDDBED_READY_FD": str(theirs.fileno())},
            pass_fds=[api.fileno(), theirs.fileno()],
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        try:
            ready.setblocking(False)
            async with asyncio.timeout(60):
                assert await asyncio.get_running_loop().sock_recv(ready, 16) == b"ready\n", "the gateway did not start"
            yield psutil.Process(process.pid), plan.port("gw0")
        finally:
            process.terminate()
            process.wait(15)
            ready.close()
            api.close()
            await source.peers.close()


@asynccontextmanager
async def nothing_process(source: Source) -> AsyncIterator[tuple[psutil.Process, int]]:
    """A process that forwards frames unread: itself and its port."""
    server = await asyncio.start_server(source.serve_raw, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", NOTHING, str(port)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield psutil.Process(process.pid), int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()
        server.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(server.wait_closed(), 2)


async def read_events(port: int, tokens: int) -> list[int]:
    """Ask for a streamed answer; when each of its tokens was read (ns). Fails unless all came, in order."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    body = json.dumps({"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    arrived: list[tuple[int, bytes]] = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            arrived.append((time.monotonic_ns(), line))
    writer.close()
    times: list[int] = []
    for at_ns, line in arrived:
        pdd = json.loads(line[6:])["pdd"]
        assert pdd.get("position", len(PROMPT) + len(times)) == len(PROMPT) + len(times), "a token is missing or twice"
        times += [at_ns] * len(pdd.get("token_ids", ()))
    assert len(times) == tokens, f"{len(times)} of {tokens} tokens"
    return times


async def read_frames(port: int, tokens: int) -> list[int]:
    """As `read_events`, of raw frames."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{tokens}\n".encode())
    ends, total = [], 0
    for index in range(tokens):
        finish = "length" if index == tokens - 1 else None
        message = Tokens(
            request="cmpl-" + "0" * 24, position=len(PROMPT) + index, ids=[LETTERS[index % 26]], finish_reason=finish
        )
        total += len(pack(kind_of(message), encode(message)))
        ends.append(total)
    times: list[int] = []
    read = 0
    while data := await reader.read(65536):
        read += len(data)
        while len(times) < tokens and ends[len(times)] <= read:
            times.append(time.monotonic_ns())
    writer.close()
    assert len(times) == tokens
    return times


Reader = Callable[[int, int], Awaitable[list[int]]]


async def latency_ms(source: Source, read: Reader, port: int, tokens: int) -> list[float]:
    """From the source's post to the client's read, token by token, one stream."""
    source.interval_s, source.posted_ns = INTERVAL_S, []
    times = await read(port, tokens)
    return [(at - posted) / 1e6 for at, posted in zip(times, source.posted_ns, strict=True)][10:]


async def cost_ms(source: Source, read: Reader, process: psutil.Process, port: int, tokens: int, streams: int) -> float:
    """CPU time of the process in the middle, a token."""
    source.interval_s, source.posted_ns = 0.0, []
    before = sum(process.cpu_times()[:2])
    await asyncio.gather(*(read(port, tokens) for _ in range(streams)))
    return (sum(process.cpu_times()[:2]) - before) / (tokens * streams) * 1e3


async def measure(tokens: int, streams: int, rounds: int) -> dict[str, Any]:
    """Both figures, with the gateway and with nothing in its place."""
    loaded = load_model(ModelSpec("tiny"))
    source = Source()
    found: dict[str, dict[str, list[float]]] = {
        name: {"p50": [], "p99": [], "cost": []} for name in ("gateway", "nothing")
    }
    async with gateway_process(loaded, source) as gateway, nothing_process(source) as nothing:
        await read_events(gateway[1], 200)  # whatever only a first request costs
        await read_frames(nothing[1], 200)
        for _ in range(rounds):
            for name, read, (process, port) in (
                ("gateway", read_events, gateway),
                ("nothing", read_frames, nothing),
            ):
                spent = await latency_ms(source, read, port, tokens)
                found[name]["p50"].append(statistics.median(spent))
                found[name]["p99"].append(statistics.quantiles(spent, n=100)[98])
                found[name]["cost"].append(await cost_ms(source, read, process, port, tokens, streams))
    best = {name: {figure: min(values) for figure, values in figures.items()} for name, figures in found.items()}
    return {
        "tokens": tokens,
        "streams": streams,
        "rounds": rounds,
        "limit_ms": LIMIT_MS,
        "latency_p50_ms": {name: best[name]["p50"] for name in best},
        "latency_p99_ms": {name: best[name]["p99"] for name in best},
        "cpu_ms_per_token": {name: best[name]["cost"] for name in best},
        "overhead_latency_ms": best["gateway"]["p50"] - best["nothing"]["p50"],
        "overhead_cpu_ms": best["gateway"]["cost"] - best["nothing"]["cost"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    harness.add_option(parser)
    options = parser.parse_args()
    found = asyncio.run(measure(options.tokens, options.streams, options.rounds))
    print(f"{'':28}{'gateway':>10}{'nothing':>10}")
    for name, figure in (
        ("latency p50 (ms)", "latency_p50_ms"),
        ("latency p99 (ms)", "latency_p99_ms"),
        ("CPU a token (ms)", "cpu_ms_per_token"),
    ):
        print(f"{name:28}{found[figure]['gateway']:10.3f}{found[figure]['nothing']:10.3f}")
    holds = max(found["overhead_latency_ms"], found["overhead_cpu_ms"]) < LIMIT_MS
    latency, cost = found["overhead_latency_ms"], found["overhead_cpu_ms"]
    verdict = "met" if holds else "MISSED"
    print(f"overhead a token: {latency:.3f} ms of latency, {cost:.3f} ms of CPU; limit {LIMIT_MS} ms: {verdict}")
    harness.write(options.out, found)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
