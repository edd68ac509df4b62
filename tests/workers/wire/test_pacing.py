"""A path that gives each connection a bandwidth of its own: TCP keeps to it, and connections do not share it."""

import asyncio
import socket
import time

from tests.workers.wire.pair import BYTES_PER_TOKEN, End, QuickPath, outgoing
from workers.wire.connection import Connection
from workers.wire.stream import MAX_PACING_RATE

RATE_BPS = 4_000_000
TOKENS = 480  # 480 KB: a second at this rate
FREE_BYTES = 140_000  # what leaves at once: two of loopback's segments


def test_a_connection_sends_no_faster_than_its_own_bandwidth() -> None:
    async def scenario() -> tuple[float, float]:
        p0, md0 = End("p0", "prefill"), End("md0", "main-decode")
        p0.connect(md0, connections=2, path=QuickPath(connection_bps=RATE_BPS))
        md0.connect(p0)
        async with md0, p0:
            await p0.peers.wait_connected(["md0"], 5)
            pool = p0.peers.pools["md0"]
            for _ in range(2):  # Linux does not pace a connection's first ten segments, of 64 KB on loopback
                await asyncio.gather(*(outgoing(p0.memory, f"w{i}", TOKENS).deliver(pool) for i in range(2)))
            began = time.monotonic()
            await outgoing(p0.memory, "alone", TOKENS).deliver(pool)
            alone = time.monotonic() - began
            began = time.monotonic()
            await asyncio.gather(*(outgoing(p0.memory, f"r{i}", TOKENS).deliver(pool) for i in range(2)))
            return alone, time.monotonic() - began

    alone, together = asyncio.run(scenario())
    least = (TOKENS * BYTES_PER_TOKEN - FREE_BYTES) * 8 / RATE_BPS
    assert alone > least, "faster than its bandwidth"
    assert together > least, "faster than its bandwidth"
    # two on one bandwidth would take twice as long; the bound leaves room for a busy machine
    assert together < 1.7 * alone + 0.5, "two connections share one bandwidth"


def test_only_connections_for_kv_have_it() -> None:
    """What the kernel was asked for: ids and notices are not held up by what KV may take."""

    def asked_bytes_per_s(connection: Connection) -> int:
        return connection._stream._sock.getsockopt(socket.SOL_SOCKET, MAX_PACING_RATE)

    async def scenario() -> tuple[int, int, int]:
        p0, md0 = End("p0", "prefill"), End("md0", "main-decode")
        p0.connect(md0, connections=1, path=QuickPath(connection_bps=RATE_BPS))
        md0.connect(p0, path=QuickPath(connection_bps=RATE_BPS))
        async with md0, p0:
            await p0.peers.wait_connected(["md0"], 5)
            await md0.peers.wait_connected(["p0"], 5)
            kv, there, back = p0.peers.pools["md0"].take_idle(), p0.peers.link("md0"), md0.peers.link("p0")
            assert kv is not None
            assert there is not None
            assert back is not None
            return tuple(map(asked_bytes_per_s, (kv.connection, there._connection, back._connection)))

    assert asyncio.run(scenario()) == (RATE_BPS // 8, -1, -1), "-1: no limit"
