"""TCP from host_a to host_b in plain sockets, timed where it arrives: steady goodput, and warm transfers."""

import socket
import struct
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from testbed.links.rig import HOST_B, Rig
from testbed.machine.netns import network_namespace_of

_CHUNK = bytes(1 << 20)
_PORT = 7300


class Flow:
    """One connection. `arrivals` grows in a thread: (monotonic time, bytes received so far)."""

    def __init__(self, sender: socket.socket, connection: socket.socket) -> None:
        self.sender = sender
        self.arrivals: list[tuple[float, int]] = []
        self._connection = connection
        self.receiving = threading.Thread(target=self._receive, daemon=True)
        self.receiving.start()

    def _receive(self) -> None:
        buffer = bytearray(1 << 20)
        total = 0
        with self._connection:
            try:
                while count := self._connection.recv_into(buffer):
                    total += count
                    self.arrivals.append((time.monotonic(), total))
            except ConnectionResetError:
                pass

    def bits_per_second(self, since: float, until: float) -> float:
        """From the first arrival after `since` to the last one before `until`; 0 when there are too few."""
        inside = [arrival for arrival in list(self.arrivals) if since <= arrival[0] <= until]
        if len(inside) < 2 or inside[-1][0] == inside[0][0]:
            return 0.0
        return (inside[-1][1] - inside[0][1]) * 8 / (inside[-1][0] - inside[0][0])


@contextmanager
def flow(rig: Rig, congestion: str) -> Iterator[Flow]:
    """A connected flow; what is unsent at the end of the block is thrown away."""
    with ExitStack() as stack:
        with network_namespace_of(rig.host_b):
            listener = stack.enter_context(socket.create_server((HOST_B, _PORT)))
        with network_namespace_of(rig.host_a):
            sender = stack.enter_context(socket.socket())
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        sender.connect((HOST_B, _PORT))
        connection, _ = listener.accept()
        listener.close()
        yield Flow(sender, connection)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def goodput_bps(rig: Rig, skip_s: float, seconds: float, congestion: str = "cubic", flows: int = 1) -> float:
    """Payload bits/s of all flows together at the receiver, after `skip_s`."""
    with ExitStack() as stack:
        running = [stack.enter_context(flow(rig, congestion)) for _ in range(flows)]
        since = time.monotonic() + skip_s
        until = since + seconds
        senders = [threading.Thread(target=_send_until, args=(one.sender, until)) for one in running]
        for thread in senders:
            thread.start()
        time.sleep(skip_s + seconds)
        result = sum(one.bits_per_second(since, until) for one in running)
        for one in running:
            one.sender.shutdown(socket.SHUT_RDWR)  # wakes a sender that waits for room
        for thread in senders:
            thread.join()
        return result


def _send_until(sender: socket.socket, until: float) -> None:
    try:
        while time.monotonic() < until:
            sender.sendall(_CHUNK)
    except OSError:
        pass


@dataclass(frozen=True, slots=True)
class Timed:
    """`bytes` from the first to the last byte's arrival, and how long the connection was warmed before."""

    bytes: int
    seconds: float
    warm_up_s: float

    @property
    def bits_per_second(self) -> float:
        return self.bytes * 8 / self.seconds


def warm_transfer(rig: Rig, size: int, congestion: str, warm_bps: float, warm_limit_s: float, pause_s: float) -> Timed:
    """Send until the receiver has seen `warm_bps` for half a second, pause, then time `size` bytes."""
    with flow(rig, congestion) as one:
        start = time.monotonic()
        sent = 0
        while not _is_warm(one, warm_bps) and time.monotonic() - start < warm_limit_s:
            one.sender.sendall(_CHUNK)
            sent += len(_CHUNK)
        warm_up_s = time.monotonic() - start
        while not one.arrivals or one.arrivals[-1][1] < sent:
            time.sleep(0.01)
        time.sleep(pause_s)
        for _ in range(size // len(_CHUNK)):
            one.sender.sendall(_CHUNK)
        one.sender.shutdown(socket.SHUT_WR)
        one.receiving.join(120)
        timed = [at for at, total in one.arrivals if total > sent]
    return Timed(size, timed[-1] - timed[0], warm_up_s)


def _is_warm(one: Flow, warm_bps: float) -> bool:
    """Did the last half second as a whole, not a burst in it, bring `warm_bps`?"""
    if not one.arrivals or one.arrivals[-1][0] - one.arrivals[0][0] < 0.5:
        return False
    now, total = one.arrivals[-1]
    _, before = one.arrivals[bisect_left(one.arrivals, (now - 0.5, 0)) - 1]
    return (total - before) * 8 / 0.5 >= warm_bps
