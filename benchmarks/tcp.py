"""One TCP connection from host_a to host_b in pure sockets: warmed up, then a timed transfer on the same one."""

import socket
import threading
import time
from dataclasses import dataclass

from testbed.links.rig import HOST_B, Rig
from testbed.netns import network_namespace_of

_CHUNK = bytes(1 << 20)


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
    with network_namespace_of(rig.host_b):
        listener = socket.create_server((HOST_B, 7300))
    with network_namespace_of(rig.host_a):
        sender = socket.socket()
    sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    arrivals: list[tuple[float, int]] = []  # time, bytes so far

    def receive() -> None:
        connection, _ = listener.accept()
        buffer = bytearray(1 << 20)
        total = 0
        with connection:
            while count := connection.recv_into(buffer):
                total += count
                arrivals.append((time.monotonic(), total))

    receiving = threading.Thread(target=receive, daemon=True)
    receiving.start()
    with listener, sender:
        sender.connect((HOST_B, 7300))
        start = time.monotonic()
        sent = 0
        while not _is_warm(arrivals, warm_bps) and time.monotonic() - start < warm_limit_s:
            sender.sendall(_CHUNK)
            sent += len(_CHUNK)
        warm_up_s = time.monotonic() - start
        while not arrivals or arrivals[-1][1] < sent:
            time.sleep(0.01)
        time.sleep(pause_s)
        for _ in range(size // len(_CHUNK)):
            sender.sendall(_CHUNK)
        sender.shutdown(socket.SHUT_WR)
        receiving.join(120)
    timed = [(at, total) for at, total in arrivals if total > sent]
    return Timed(size, timed[-1][0] - timed[0][0], warm_up_s)


def _is_warm(arrivals: list[tuple[float, int]], warm_bps: float) -> bool:
    if not arrivals:
        return False
    now, total = arrivals[-1]
    for at, before in reversed(arrivals):
        if now - at >= 0.5:
            return (total - before) * 8 / (now - at) >= warm_bps
    return False
