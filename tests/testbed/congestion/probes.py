"""Sockets of this process in hosts of a lab, and packets through them that know when they were sent.

A socket belongs to the namespace it was made in, so the test itself can send from one host and receive on another, on
one clock: CLOCK_MONOTONIC, and the kernel's receive stamps moved onto it.
"""

import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from testbed.lab.control import ask_for_descriptors
from testbed.lab.messages import Enter
from testbed.lab.record import find_record
from workers.linux import CLONE_NEWNET, setns

_SO_TIMESTAMPNS, _SO_RCVBUFFORCE = 35, 33


def socket_in(lab: str, host: str) -> socket.socket:
    """A UDP socket in a host of a lab."""
    reply, fds = ask_for_descriptors(find_record(lab), Enter(host))
    namespaces = dict(zip(reply.namespaces, fds, strict=True))
    made: list[socket.socket] = []

    def make() -> None:
        setns(namespaces["net"], CLONE_NEWNET)  # of this thread, which ends with it
        made.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    for fd in fds:
        os.close(fd)
    return made[0]


@dataclass
class Probe:
    """Numbered packets from one host to another; all times are CLOCK_MONOTONIC in ns."""

    sender: socket.socket
    receiver: socket.socket
    sent: list[int] = field(default_factory=list)  # when, by number
    received: dict[int, int] = field(default_factory=dict)  # when, by number
    sizes: dict[int, int] = field(default_factory=dict)  # IP bytes, by number
    stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def sending(self, per_second: float, size: int = 100) -> Iterator[None]:
        """Packets of `size` bytes of payload, evenly, during the block."""
        over = threading.Event()
        thread = threading.Thread(target=self._send, args=(per_second, size, over))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _send(self, per_second: float, size: int, over: threading.Event) -> None:
        start = time.monotonic_ns()
        payload = bytes(size - 8)
        for number in itertools.count():
            if over.is_set():
                return
            wait = start + round(number * 1e9 / per_second) - time.monotonic_ns()
            if wait > 0:
                time.sleep(wait / 1e9)
            self.sent.append(time.monotonic_ns())
            self.sender.send(number.to_bytes(8, "big") + payload)

    def receive(self) -> None:
        """Until it is stopped."""
        self.receiver.settimeout(0.1)
        offset = time.time_ns() - time.monotonic_ns()
        while not self.stop.is_set():
            try:
                data, ancillary, _, _ = self.receiver.recvmsg(2048, 64)
            except TimeoutError:
                continue
            (stamp,) = [struct.unpack("=qq", content) for _, kind, content in ancillary if kind == _SO_TIMESTAMPNS]
            number = int.from_bytes(data[:8], "big")
            self.received[number] = stamp[0] * 10**9 + stamp[1] - offset
            self.sizes[number] = len(data) + 28

    def delays_ms(self) -> list[tuple[int, float]]:
        """(when sent, one-way delay) of every packet that arrived."""
        return [(self.sent[number], (at - self.sent[number]) / 1e6) for number, at in sorted(self.received.items())]


@contextmanager
def probe(lab: str, source: str, target: str, address: str, port: int) -> Iterator[Probe]:
    """A probe that receives until the end of the block."""
    receiver, sender = socket_in(lab, target), socket_in(lab, source)
    receiver.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 32 << 20)
    receiver.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    receiver.bind((address, port))
    sender.connect((address, port))
    running = Probe(sender, receiver)
    thread = threading.Thread(target=running.receive)
    thread.start()
    try:
        yield running
    finally:
        running.stop.set()
        thread.join()
        sender.close()
        receiver.close()
