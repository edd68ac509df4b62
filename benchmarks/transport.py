"""KV from one worker's blocks to another's over loopback: bytes per second, checksums on, by the real wire code.

    python -m benchmarks.transport [--rounds 5] [--out results/transport.json]

Two processes, the sender's `OutgoingKv` over a pool of connections and the receiver's `receive_transfers`, with plain
memory instead of a model's: every byte is read from blocks, summed with xxh3-64, sent, received into blocks, and summed
again. A figure is the best of the rounds, from the first frame to the receiver's last checksum; the reference is the
same number of bytes through one plain socket, without checksums.
"""

import argparse
import asyncio
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any

from benchmarks import harness
from workers.wire.connection import Local
from workers.wire.frames import PROTOCOL_VERSION
from workers.wire.handshake import Facts
from workers.wire.kv_messages import KvBegin
from workers.wire.kv_receive import IncomingKv
from workers.wire.kv_send import OutgoingKv
from workers.wire.kv_source import First, KvSource
from workers.wire.messages import RequestSpec, SamplingSpec, TokenLogprob
from workers.wire.peers import Peer, Peers
from workers.wire.stream import Target

TARGET_BYTES_PER_S = 1e9
BLOCK_SIZE = 16
TOTAL_BYTES = 256 << 20
# KV bytes of a token: the built-in model, SmolLM2-135M in bf16 and fp32, Llama-3.1 8B in bf16
BYTES_PER_TOKEN = {"tiny": 2048, "smollm2-bf16": 23_040, "smollm2-fp32": 46_080, "llama-8b": 131_072}


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case; `seconds` of each round."""

    model: str
    block_bytes: int
    transfers: int
    bytes: int
    seconds: tuple[float, ...]
    bytes_per_s: float  # best round


class Memory:
    """Blocks in one piece of memory (wire's `Storage`)."""

    block_size = BLOCK_SIZE

    def __init__(self, total: int, bytes_per_token: int) -> None:
        self.bytes_per_token = bytes_per_token
        self.blocks = total // (bytes_per_token * BLOCK_SIZE)
        self.data = memoryview(bytearray(b"\xa5" * (self.blocks * bytes_per_token * BLOCK_SIZE)))

    def view(self, block: int, num_tokens: int) -> memoryview:
        start = block * BLOCK_SIZE * self.bytes_per_token
        return self.data[start : start + num_tokens * self.bytes_per_token]


class Incoming:
    """One transfer into a share of the memory (wire's `IncomingKv`)."""

    cancelled = False

    def __init__(self, memory: Memory, first: int) -> None:
        self._memory = memory
        self._first = first

    def views(self, first_block: int, tokens: list[int]) -> list[memoryview]:
        return [self._memory.view(self._first + first_block + i, count) for i, count in enumerate(tokens)]

    def attach(self, target: Target | None) -> None:
        pass

    def verified(self, blocks: int) -> None:
        pass

    def complete(
        self, first_token: int, finish_reason: str | None, received_ns: int, first_logprob: TokenLogprob | None
    ) -> None:
        pass

    def failed(self, error: str, reason: str) -> None:
        raise SystemExit(f"a transfer failed: {reason}")


class Worker:
    """The least a worker is to the wire (its `Handler` and `Receiver`)."""

    block_size = BLOCK_SIZE

    def __init__(self, memory: Memory) -> None:
        self.bytes_per_token = memory.bytes_per_token
        self._memory = memory

    def begin(self, begin: KvBegin) -> IncomingKv:
        return Incoming(self._memory, begin.spec.sampling.max_tokens)  # where its share begins

    def on_message(self, peer: str, message: object) -> None:
        pass

    def on_lost(self, peer: str, reason: str) -> None:
        pass

    def on_change(self) -> None:
        pass

    def status_for(self, peer: str) -> None:
        return None


def _peers(name: str, role: str, other: tuple[str, str, int], memory: Memory, connections: int) -> Peers:
    facts = Facts(
        name=name,
        role=role,
        protocol=PROTOCOL_VERSION,
        model="memory",
        fingerprint="0" * 32,
        block_size=BLOCK_SIZE,
        kv_shape=[memory.bytes_per_token],
        kv_dtype="uint8",
    )
    peer = Peer(other[0], other[1], "here", "127.0.0.1", other[2])
    worker: Any = Worker(memory)
    return Peers(Local(facts, bytes(32)), [peer], worker, worker, connections)


def _receive(pipe: Pipe, total: int, bytes_per_token: int) -> None:
    """The receiver's process: says its port, then serves until told to end."""
    memory = Memory(total, bytes_per_token)
    for start in range(0, len(memory.data), 4096):
        memory.data[start] = 0  # no page is touched for the first time while the clock runs

    async def serve() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        pipe.send(listener.getsockname()[1])
        peers = _peers("md0", "main-decode", ("p0", "prefill", 1), memory, 0)
        await peers.start(listener)
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await peers.close()
        pipe.send(bytes(memory.data[:: 1 << 16]) == b"\xa5" * len(memory.data[:: 1 << 16]))

    asyncio.run(serve())


def measure(model: str, transfers: int, rounds: int, total: int = TOTAL_BYTES) -> Row:
    """Send `total` bytes in so many transfers at once, over as many connections, `rounds` times."""
    bytes_per_token = BYTES_PER_TOKEN[model]
    share = total // (bytes_per_token * BLOCK_SIZE * transfers)
    total = share * transfers * BLOCK_SIZE * bytes_per_token  # no block is left out: all are checked in the end
    memory = Memory(total, bytes_per_token)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs, total, bytes_per_token))
    process.start()
    theirs.close()
    port = ours.recv()

    async def send() -> list[float]:
        peers = _peers("p0", "prefill", ("md0", "main-decode", port), memory, transfers)
        await peers.start(None)
        await peers.wait_connected(["md0"], 10)
        taken = [await _round(peers, memory, share, transfers) for _ in range(rounds)]
        await peers.close()
        return taken

    try:
        seconds = asyncio.run(send())
        ours.send("end")
        if not ours.recv():
            raise SystemExit("what arrived is not what was sent")
    finally:
        ours.close()
        process.join(10)
    return Row(model, BLOCK_SIZE * bytes_per_token, transfers, total, tuple(seconds), total / min(seconds))


async def _round(peers: Peers, memory: Memory, share: int, transfers: int) -> float:
    tokens = share * BLOCK_SIZE
    outgoing = []
    for index in range(transfers):
        first = index * share
        sampling = SamplingSpec(max_tokens=first)
        spec = RequestSpec(
            id=f"r{index}",
            gateway="gw0",
            prefill="p0",
            relay=None,
            main="md0",
            prompt=[1] * tokens,
            sampling=sampling,
            deadline_s=60,
        )
        blocks = list(range(first, first + share))
        outgoing.append(OutgoingKv(spec, memory, blocks, KvSource.finished(tokens, First(1))))
    pool = peers.pools["md0"]
    began_ns = time.monotonic_ns()
    delivered = await asyncio.gather(*(kv.deliver(pool) for kv in outgoing))
    return (max(one.received_ns for one in delivered) - began_ns) / 1e9


def plain_socket(total: int, rounds: int) -> float:
    """Bytes per second of sendall and recv_into between two threads' sockets, best round: what loopback can do."""
    source, best = memoryview(bytes(1 << 20)), 0.0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(rounds):
            sender = socket.create_connection(listener.getsockname())
            receiver, _ = listener.accept()
            with sender, receiver:
                thread = threading.Thread(target=_pour, args=(sender, source, total >> 20))
                began, left, into = time.monotonic(), total, bytearray(1 << 20)
                thread.start()
                while left > 0:
                    left -= receiver.recv_into(into)
                best = max(best, total / (time.monotonic() - began))
                thread.join()
    return best


def _pour(sender: socket.socket, source: memoryview, times: int) -> None:
    with suppress(OSError):
        for _ in range(times):
            sender.sendall(source)


def report(rows: list[Row], plain: float, say: Callable[[str], None]) -> bool:
    """Print the table; whether every row of one transfer reaches the target."""
    say(f"{'MODEL':<14}{'BLOCK':>10}{'TRANSFERS':>11}{'BYTES':>12}{'BEST':>12}{'MEDIAN':>12}")
    for row in rows:
        median = row.bytes / sorted(row.seconds)[len(row.seconds) // 2]
        say(
            f"{row.model:<14}{row.block_bytes:>10}{row.transfers:>11}{row.bytes:>12}"
            f"{row.bytes_per_s / 1e9:>9.2f} GB/s{median / 1e9:>7.2f} GB/s"
        )
    say(f"plain socket, no checksums: {plain / 1e9:.2f} GB/s")
    return all(row.bytes_per_s >= TARGET_BYTES_PER_S for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    harness.add_option(parser)
    options = parser.parse_args()
    rows = [measure(model, transfers, options.rounds) for model in BYTES_PER_TOKEN for transfers in (1, 8)]
    plain = plain_socket(TOTAL_BYTES, options.rounds)
    lines: list[str] = []
    reached = report(rows, plain, lines.append)
    print("\n".join(lines))
    figures = {"target_bytes_per_s": TARGET_BYTES_PER_S, "plain_socket_bytes_per_s": plain}
    harness.write(options.out, {**figures, "rows": [asdict(row) for row in rows]}, lines)
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
