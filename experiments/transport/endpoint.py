"""One end of the transport, as a process inside a lab's host: prefill sends what it is told, main decode receives.

Orders come as JSON lines on stdin, results leave as JSON lines on stdout; the end of stdin is the end. Knows of the lab
what any worker knows: the PDDBED_* variables. No torch.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from experiments.transport.memory import Memory, Shape, Shelf
from workers.environment import WorkerEnvironment, read_environment
from workers.wire.connection import Local
from workers.wire.frames import PROTOCOL_VERSION, WireError
from workers.wire.handshake import Facts
from workers.wire.kv_send import OutgoingKv
from workers.wire.kv_source import First, KvSource
from workers.wire.messages import RequestSpec, SamplingSpec
from workers.wire.peers import Peers
from workers.worker_records import ByteLog

NICENESS = -10  # of an endpoint that computes as well
CONNECT_S = 280.0  # an emulated CPU takes its time, the more so where others run beside it


class Endpoint:
    """A worker without a model (wire's `Handler`)."""

    def __init__(self, environment: WorkerEnvironment, shape: Shape, connection_bps: int | None) -> None:
        self._environment = environment
        self._shape = shape
        facts = Facts(
            name=environment.host,
            role=environment.role,
            protocol=PROTOCOL_VERSION,
            model="plain memory",
            fingerprint="0" * 32,
            block_size=shape.block_size,
            kv_shape=[shape.bytes_per_token],
            kv_dtype="uint8",
        )
        sends = environment.role == "prefill"
        connections = environment.serving.kv_pool.connections
        peers = [
            replace(peer, path=replace(peer.path, connection_bps=connection_bps if sends else None))
            for peer in environment.peers
            if peer.role in ("prefill", "main-decode")
        ]
        self._memory = Memory(shape) if sends else None
        shelf = None if sends else Shelf(shape, connections)
        local = Local(facts, environment.secret)
        self.peers = Peers(local, peers, self, shelf, connections)
        self.byte_log = ByteLog(environment.records, environment.host, local.counters, environment.unwritten)
        self.target = next((peer.name for peer in peers if peer.role == "main-decode"), "")

    async def start(self) -> None:
        listener = None
        if self._environment.role != "prefill":
            listener = socket.create_server((self._environment.address, self._environment.port), backlog=64)
        await self.peers.start(listener)
        if self._environment.role == "prefill":
            await self.peers.wait_connected([self.target], CONNECT_S)

    async def handle(self, order: dict[str, Any]) -> None:
        """One order, to its end."""
        if order["op"] == "note":
            self.byte_log.write()
            say("noted", counts=self.peers.local.counters.rows())
        elif order["op"] == "transfers":
            await self.transfers(order)

    async def transfers(self, order: dict[str, Any]) -> None:
        """Start transfer i at `starts_ns[i]` after now, of the blocks from `first_blocks[i]` on; a line for each."""
        begin_ns = time.monotonic_ns() + int(order.get("lead_ns", 0))
        say("began", monotonic_ns=begin_ns, unix_ns=time.time_ns() + begin_ns - time.monotonic_ns())
        entries = list(zip(order["starts_ns"], order["first_blocks"], strict=True))
        tasks = [
            asyncio.create_task(self._transfer(f"{order['name']}-{index}", index, begin_ns, start_ns, first_block))
            for index, (start_ns, first_block) in enumerate(entries)
        ]
        await asyncio.gather(*tasks)
        say("done", transfers=len(tasks))

    async def _transfer(self, name: str, index: int, begin_ns: int, start_ns: int, first_block: int) -> None:
        while (left_ns := begin_ns + start_ns - time.monotonic_ns()) > 0:
            await asyncio.sleep(left_ns / 1e9)
        assert self._memory is not None
        tokens = self._shape.tokens
        spec = RequestSpec(
            id=name,
            gateway="gw0",
            prefill=self._environment.host,
            relay=None,
            main=self.target,
            prompt=[1] * tokens,
            sampling=SamplingSpec(max_tokens=1),
            deadline_s=600,
        )
        blocks = list(range(self._shape.blocks))
        asked_ns = time.monotonic_ns()
        kv = OutgoingKv(spec, self._memory, blocks, KvSource.finished(tokens, First(1)), first_block)
        delivered = await kv.deliver(self.peers.pools[self.target])
        say(
            "transfer",
            index=index,
            late_ns=asked_ns - begin_ns - start_ns,
            asked_ns=asked_ns - begin_ns,
            queue_ns=delivered.queue_ns,
            received_ns=delivered.received_ns - begin_ns,
            done_ns=time.monotonic_ns() - begin_ns,
            kv_bytes=delivered.kv_bytes,
        )

    # -- Handler -------------------------------------------------------------------------------------------------

    def on_message(self, peer: str, message: object) -> None:
        pass

    def on_lost(self, peer: str, reason: str) -> None:
        pass

    def on_change(self) -> None:
        pass

    def status_for(self, peer: str) -> None:
        return None


def say(event: str, **fields: Any) -> None:
    """One line on stdout."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


async def _orders() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=16 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


Make = Callable[[WorkerEnvironment, Shape, int | None], Endpoint]


async def serve(make: Make, real_time: bool) -> int:
    orders = await _orders()
    first = json.loads(await orders.readline())
    endpoint = make(read_environment(), Shape(**first["shape"]), first["connection_bps"])
    try:
        await endpoint.start()
        _prioritise(real_time)  # not before: starting takes a CPU for long where it is emulated
        say("ready")
        while line := await orders.readline():
            await endpoint.handle(json.loads(line))
    except (WireError, OSError) as error:
        say("failed", error=f"{os.environ.get('PDDBED_HOST')}: {error}")
        return 1
    finally:
        await endpoint.peers.close()
    return 0


def _prioritise(real_time: bool) -> None:
    """Take, where allowed, the lowest real-time priority, below the emulator's: an endpoint needs little of a CPU,
    but needs it at once, or a busy machine would be measured instead of the network. Not for one that computes."""
    with suppress(OSError):
        if real_time:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        else:
            os.nice(NICENESS)


def main(make: Make = Endpoint, *, real_time: bool = True) -> int:
    """The program: serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the experiment's to handle
    return asyncio.run(serve(make, real_time))


if __name__ == "__main__":
    sys.exit(main())
