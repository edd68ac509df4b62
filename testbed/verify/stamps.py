"""UDP sockets in two namespaces of one machine, with the kernel's receive stamps: everything is on one clock.

A probe carries its sequence number, the CLOCK_REALTIME of its sending and a checksum of both; the kernel stamps it on
arrival, so that a receiver that is scheduled late does not make the link look slow.
"""

import socket
import struct
import time
import zlib
from dataclasses import dataclass

from testbed.machine.netns import network_namespace_of

SO_TIMESTAMPNS = 35  # include/uapi/asm-generic/socket.h; the option's and the control message's number
_STAMP = struct.Struct("qq")  # struct timespec on 64-bit Linux
_NUMBERS = struct.Struct("!QQ")
_CHECK = struct.Struct("!I")
_HEAD = _NUMBERS.size + _CHECK.size
UDP_HEADERS = 28
SMALLEST_PROBE = UDP_HEADERS + _HEAD
_CONTROL_SPACE = socket.CMSG_SPACE(_STAMP.size)
UDP_SEGMENT = 103  # include/uapi/linux/udp.h
SO_NO_CHECK = 11  # include/uapi/asm-generic/socket.h
MAX_SEGMENTS = 64  # UDP_MAX_SEGMENTS before Linux 6.9
MAX_UDP_PAYLOAD = 65507
RECEIVE_BUFFER = 64 * 1024 * 1024
CATCH_UP_NS = 2_000_000


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
    """One direction between two hosts: `send` from the first, `arrivals` at the second. A context manager.

    `unchecked` probes go without a UDP checksum, so that those with a flipped bit arrive and are counted in
    `corrupted`; otherwise the receiving kernel drops them.
    """

    def __init__(self, source_pid: int, target_pid: int, target_address: str, unchecked: bool = False) -> None:
        with network_namespace_of(target_pid):
            self._receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        _enlarge(self._receiver)
        self._receiver.bind((target_address, 0))
        self._receiver.setblocking(False)
        with network_namespace_of(source_pid):
            self._sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sender.connect(self._receiver.getsockname())
        if unchecked:
            self._sender.setsockopt(socket.SOL_SOCKET, SO_NO_CHECK, 1)
        self.sent = 0
        self.corrupted = 0
        self._longest = SMALLEST_PROBE
        self._seen: set[int] = set()

    def __enter__(self) -> "ProbePath":
        return self

    def __exit__(self, *_: object) -> None:
        self._sender.close()
        self._receiver.close()

    def send(self, ip_bytes: int = SMALLEST_PROBE) -> None:
        """One probe of `ip_bytes` in all. A full local queue blocks."""
        self._longest = max(self._longest, ip_bytes)
        self._sender.send(_probe(self.sent, time.time_ns(), ip_bytes - UDP_HEADERS))
        self.sent += 1

    def send_train(self, count: int, ip_bytes: int) -> None:
        """`count` probes back to back, as fast as this machine can: the kernel cuts each call into many (UDP GSO)."""
        payload = ip_bytes - UDP_HEADERS
        self._longest = max(self._longest, ip_bytes)
        per_call = max(1, min(MAX_SEGMENTS, MAX_UDP_PAYLOAD // payload))
        self._sender.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, payload)
        try:
            for first in range(0, count, per_call):
                now_ns = time.time_ns()
                last = min(count, first + per_call)
                self._sender.send(
                    b"".join(_probe(self.sent + offset, now_ns, payload) for offset in range(last - first))
                )
                self.sent += last - first
        finally:
            self._sender.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, 0)

    def send_evenly(self, count: int, interval_ns: int, ip_bytes: int = SMALLEST_PROBE) -> list[Arrival]:
        """`count` probes on a fixed schedule; what has arrived meanwhile.

        A sender that this machine kept waiting makes up for at most `CATCH_UP_NS`, then its schedule moves: all that
        it owes at once would be a burst, which fills the link's queue and is the machine's doing.
        """
        arrivals: list[Arrival] = []
        start = time.monotonic_ns()
        for index in range(count):
            pause_ns = start + index * interval_ns - time.monotonic_ns()
            if pause_ns > 0:
                time.sleep(pause_ns / 1e9)
            else:
                start += max(0, -pause_ns - CATCH_UP_NS)
            self.send(ip_bytes)
            if index % 256 == 255:
                arrivals += self.arrivals()
        return arrivals

    def arrivals(self) -> list[Arrival]:
        """Packets that have arrived and were not taken yet."""
        found: list[Arrival] = []
        while True:
            try:
                data, control, _, _ = self._receiver.recvmsg(self._longest, _CONTROL_SPACE)
            except BlockingIOError:
                return found
            if not _is_whole(data):
                self.corrupted += 1
                continue
            sequence, sent_ns = _NUMBERS.unpack_from(data)
            self._seen.add(sequence)
            for level, kind, stamp in control:
                if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
                    seconds, nanoseconds = _STAMP.unpack(stamp)
                    found.append(Arrival(sequence, sent_ns, seconds * 1_000_000_000 + nanoseconds))

    def collect(self, patience_s: float) -> list[Arrival]:
        """Wait until every probe has arrived, or until nothing has for `patience_s`."""
        found = self.arrivals()
        quiet_since = time.monotonic()
        while len(self._seen) + self.corrupted < self.sent and time.monotonic() - quiet_since < patience_s:
            time.sleep(0.001)
            more = self.arrivals()
            if more:
                found += more
                quiet_since = time.monotonic()
        return found + self.arrivals()


def _probe(sequence: int, now_ns: int, payload_bytes: int) -> bytes:
    numbers = _NUMBERS.pack(sequence, now_ns)
    return (numbers + _CHECK.pack(zlib.crc32(numbers))).ljust(payload_bytes, b"\0")


def _is_whole(data: bytes) -> bool:
    return (
        len(data) >= _HEAD
        and _CHECK.unpack_from(data, _NUMBERS.size)[0] == zlib.crc32(data[: _NUMBERS.size])
        and data.count(0, _HEAD) == len(data) - _HEAD
    )


def _enlarge(receiver: socket.socket) -> None:
    """A large buffer, beyond the machine's limit where we may; the kernel takes what it allows."""
    so_rcvbufforce = 33
    try:
        receiver.setsockopt(socket.SOL_SOCKET, so_rcvbufforce, RECEIVE_BUFFER)
    except PermissionError:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
