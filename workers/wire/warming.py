"""Opening the TCP windows of idle KV connections with padding, so that the first transfers find them open.

A new connection starts with ten segments in flight and doubles them each round trip: the first 2 MB at 400 Mbit/s and
40 ms take 350 ms, later ones 75. Each connection of a pool is padded up to its share of the path's bandwidth-delay
product, which is what transfers on all of them at once need, and then one, which is taken first, up to `FILL` of the
product, which is what a transfer alone needs. That is less than two products of padding in all, and at no moment more
in flight than the path holds.

Policy (`warm_up_for`) and sending (`pad`); which connection, and when, is the pool's business.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from workers.wire.connection import Connection
from workers.wire.deadlines import Path
from workers.wire.kv_messages import Padding

# Of the product, in the window: a window leaves a host in one burst, and the whole product, with its headers, would
# overflow a bottleneck buffer of one product (measured: 100 packets lost, 400 ms instead of 75). It is what cubic
# itself falls back to.
FILL = 0.7
PADDING_BYTES = 16 << 10  # of a frame, and unsent in the kernel: a transfer never waits for more than that
UNKNOWN_RATE_BDP_BYTES = 4 << 20
MOST_BYTES = 256 << 20
SHORTEST_RTT_NS = 1_000_000  # below that a window opens within a few ms by itself

_ZEROS = memoryview(bytes(PADDING_BYTES))


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Bytes of padding that a pool's connections are worth: each of them, and one of them in all."""

    share_bytes: int
    whole_bytes: int
    deadline_s: float  # for each of the two: on a lossy path the window may never open so far


NO_WARM_UP = WarmUp(0, 0, 0.0)


def warm_up_for(path: Path, connections: int) -> WarmUp | None:
    """None where there is nothing to warm: within a datacenter."""
    link = path.now
    if link.rtt_ns < SHORTEST_RTT_NS:
        return None
    bdp = UNKNOWN_RATE_BDP_BYTES if link.rate_bps is None else link.rate_bps * link.rtt_ns // (8 * 10**9)
    whole = min(int(FILL * bdp), MOST_BYTES)
    share = whole // connections
    if path.connection_bps is not None:  # a window of two of its own products is wide enough for a connection
        whole = min(whole, 2 * path.connection_bps * link.rtt_ns // (8 * 10**9))
    return WarmUp(min(share, whole), whole, 1.0 + 24 * link.rtt_ns / 1e9)


async def pad(
    connection: Connection, plan: Callable[[], WarmUp], size: Callable[[], int], stop: Callable[[], bool]
) -> int:
    """Send `size` bytes of padding unless `stop` says that the connection is wanted for something better.

    `plan` and `size` are asked before each frame: a link that becomes slow must not be filled with padding of a fast
    one. Returns how many were sent. Raises WireError when the connection breaks.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    sent = 0
    with connection.little_unsent(PADDING_BYTES):
        while (left := size() - sent) > 0 and not stop() and loop.time() < began + plan().deadline_s:
            count = min(PADDING_BYTES, left)
            await connection.send(Padding(), [_ZEROS[:count]])
            sent += count
    return sent
