"""UDP through a rig: stamped probes (kernel receive stamps), numbered floods, and a paced load. No policy."""

import os
import socket
import struct
import threading
import time
from dataclasses import dataclass

from testbed.links.rig import HOST_B, Rig
from testbed.machine.netns import network_namespace_of

_SO_RCVBUFFORCE = 33
_SO_TIMESTAMPNS = 35
_UDP_SEGMENT = 103
_STAMP = struct.Struct("<IQ")  # number, CLOCK_REALTIME in ns at the send call


@dataclass(frozen=True, slots=True)
class Arrival:
    """One received probe; `delay_ns` is from the send call to the kernel's receive stamp."""

    number: int
    delay_ns: int


class Receiver:
    """A socket on host_b that collects probes in a thread of its own, or holds them until asked."""

    def __init__(self, rig: Rig, port: int, buffer_bytes: int = 64 << 20) -> None:
        with network_namespace_of(rig.host_b):
            self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, buffer_bytes)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.socket.bind((HOST_B, port))

    def collect(self, count: int, silence_s: float) -> list[Arrival]:
        """Up to `count` probes; ends early when none comes for `silence_s`."""
        self.socket.settimeout(silence_s)
        arrivals: list[Arrival] = []
        try:
            while len(arrivals) < count:
                data, ancillary, _, _ = self.socket.recvmsg(2048, 64)
                seconds, nanoseconds = struct.unpack("qq", ancillary[0][2])
                number, sent = _STAMP.unpack_from(data)
                arrivals.append(Arrival(number, seconds * 1_000_000_000 + nanoseconds - sent))
        except TimeoutError:
            pass
        return arrivals


def sender(rig: Rig, port: int) -> socket.socket:
    """A socket on host_a connected to host_b."""
    with network_namespace_of(rig.host_a):
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect((HOST_B, port))
    return sock


def send_probes(sock: socket.socket, count: int, per_second: float, size: int = 64) -> None:
    """Numbered, stamped probes, evenly spaced.

    At real-time priority, in a thread of its own: between the stamp and the send nobody may come in.
    """
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    padding = bytes(size - _STAMP.size)
    start = time.monotonic()
    for number in range(count):
        wait = start + number / per_second - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        sock.send(_STAMP.pack(number, time.time_ns()) + padding)


def probe(rig: Rig, count: int, per_second: float, silence_s: float, port: int = 7100) -> list[Arrival]:
    """Send `count` probes and return those that arrived, in the order of arrival."""
    receiver = Receiver(rig, port)
    sock = sender(rig, port)
    sending = threading.Thread(target=send_probes, args=(sock, count, per_second))
    sending.start()
    arrivals = receiver.collect(count, silence_s)
    sending.join()
    return arrivals


class Load:
    """`rate_bps` of IP bytes as full UDP packets from host_a into a socket nobody reads, in a `with` block."""

    def __init__(self, rig: Rig, rate_bps: int, port: int = 7200, payload: int = 1472, burst: int = 8) -> None:
        self._sink = Receiver(rig, port, buffer_bytes=4096)
        self._socket = sender(rig, port)
        self._socket.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, payload)
        self._message = bytes(payload * burst)
        self._gap_s = (payload + 28) * burst * 8 / rate_bps
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.sent_bytes = 0

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            self._socket.send(self._message)
            self.sent_bytes += len(self._message)
            due += self._gap_s
            wait = due - time.monotonic()
            if wait > 0:
                time.sleep(wait)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
