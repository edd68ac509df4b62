"""UDP sockets in two namespaces of one machine, with the kernel's receive stamps: everything is on one clock.

A probe carries its sequence number and the CLOCK_REALTIME of its sending; the kernel stamps it on arrival, so that a
receiver that is scheduled late does not make the link look slow.
"""

import socket
import struct
import time
from dataclasses import dataclass

from testbed.netns import network_namespace_of

SO_TIMESTAMPNS = 35  # include/uapi/asm-generic/socket.h; the option's and the control message's number
_STAMP = struct.Struct("qq")  # struct timespec on 64-bit Linux
_PROBE = struct.Struct("!QQ")
UDP_HEADERS = 28
SMALLEST_PROBE = UDP_HEADERS + _PROBE.size
_CONTROL_SPACE = socket.CMSG_SPACE(_STAMP.size)
UDP_SEGMENT = 103  # include/uapi/linux/udp.h
MAX_SEGMENTS = 64  # UDP_MAX_SEGMENTS before Linux 6.9
MAX_UDP_PAYLOAD = 65507
RECEIVE_BUFFER = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Arrival:
    """One probe: its number, when it was sent and when the kernel had it, in ns of CLOCK_REALTIME."""

    sequence: int
    sent_ns: int
    received_ns: int

    @property
    def delay_ns(self) -> int:
        return self.received_ns - self.sent_ns


class ProbePath:
    """One direction between two hosts: `send` from the first, `arrivals` at the second. A context manager."""

    def __init__(self, source_pid: int, target_pid: int, target_address: str) -> None:
        with network_namespace_of(target_pid):
            self._receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        _enlarge(self._receiver)
        self._receiver.bind((target_address, 0))
        self._receiver.setblocking(False)
        with network_namespace_of(source_pid):
            self._sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sender.connect(self._receiver.getsockname())
        self.sent = 0

    def __enter__(self) -> "ProbePath":
        return self

    def __exit__(self, *_: object) -> None:
        self._sender.close()
        self._receiver.close()

    def send(self, ip_bytes: int = SMALLEST_PROBE) -> None:
        """One probe of `ip_bytes` in all. A full local queue blocks."""
        padding = bytes(ip_bytes - SMALLEST_PROBE)
        self._sender.send(_PROBE.pack(self.sent, time.time_ns()) + padding)
        self.sent += 1

    def send_train(self, count: int, ip_bytes: int) -> None:
        """`count` probes back to back, as fast as this machine can: the kernel cuts each call into many (UDP GSO)."""
        payload = ip_bytes - UDP_HEADERS
        per_call = max(1, min(MAX_SEGMENTS, MAX_UDP_PAYLOAD // payload))
        self._sender.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, payload)
        try:
            for first in range(0, count, per_call):
                now_ns = time.time_ns()
                last = min(count, first + per_call)
                self._sender.send(
                    b"".join(
                        _PROBE.pack(self.sent + offset, now_ns).ljust(payload, b"\0") for offset in range(last - first)
                    )
                )
                self.sent += last - first
        finally:
            self._sender.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, 0)

    def send_evenly(self, count: int, interval_ns: int, ip_bytes: int = SMALLEST_PROBE) -> list[Arrival]:
        """`count` probes on a fixed schedule (late ones do not shift the rest); what has arrived meanwhile."""
        arrivals: list[Arrival] = []
        start = time.monotonic_ns()
        for index in range(count):
            pause_ns = start + index * interval_ns - time.monotonic_ns()
            if pause_ns > 0:
                time.sleep(pause_ns / 1e9)
            self.send(ip_bytes)
            if index % 256 == 255:
                arrivals += self.arrivals()
        return arrivals

    def arrivals(self) -> list[Arrival]:
        """What has arrived and was not taken yet."""
        found: list[Arrival] = []
        while True:
            try:
                data, control, _, _ = self._receiver.recvmsg(_PROBE.size, _CONTROL_SPACE)
            except BlockingIOError:
                return found
            sequence, sent_ns = _PROBE.unpack(data)
            for level, kind, stamp in control:
                if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
                    seconds, nanoseconds = _STAMP.unpack(stamp)
                    found.append(Arrival(sequence, sent_ns, seconds * 1_000_000_000 + nanoseconds))

    def collect(self, expected: int, patience_s: float) -> list[Arrival]:
        """Wait until `expected` more have arrived, or until nothing has for `patience_s`."""
        found = self.arrivals()
        quiet_since = time.monotonic()
        while len(found) < expected and time.monotonic() - quiet_since < patience_s:
            time.sleep(0.001)
            more = self.arrivals()
            if more:
                found += more
                quiet_since = time.monotonic()
        return found


def _enlarge(receiver: socket.socket) -> None:
    """A large buffer, beyond the machine's limit where we may; the kernel takes what it allows."""
    so_rcvbufforce = 33
    try:
        receiver.setsockopt(socket.SOL_SOCKET, so_rcvbufforce, RECEIVE_BUFFER)
    except PermissionError:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
