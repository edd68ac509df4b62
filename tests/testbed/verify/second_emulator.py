"""A second emulator on any Ethernet interface, of which the lab knows nothing: what leaves there is made late, lost,
doubled, corrupted or out of order.

A filter redirects what leaves the interface to a TAP device; this thread sends it on past the filter.
"""

import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from types import TracebackType
from typing import Self

from testbed.machine.netns import network_namespace_of

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
SOL_PACKET, PACKET_QDISC_BYPASS = 263, 20
ETHERNET_HEADER = 14
TAP = "lie0"


class SecondEmulator:
    """On the interface `ifname` of the namespace of `pid`. Change the attributes while it runs; shares are 0 to 1."""

    def __init__(self, pid: int, ifname: str) -> None:
        self._pid, self._ifname = pid, ifname
        self.delay_s = self.loss = self.duplicate = self.corrupt = self.late = 0.0
        self._random = random.Random(1)
        self._over = threading.Event()

    def __enter__(self) -> Self:
        with network_namespace_of(self._pid):
            self._tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(self._tap, TUNSETIFF, struct.pack("16sH22x", TAP.encode(), IFF_TAP | IFF_NO_PI))
            self._out = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
            self._out.setsockopt(SOL_PACKET, PACKET_QDISC_BYPASS, 1)
            self._out.bind((self._ifname, 0))
        self._run("ip", "link", "set", TAP, "up", "mtu", "9000", "txqueuelen", "20000")
        self._run("tc", "qdisc", "add", "dev", self._ifname, "clsact")
        redirect = ("action", "mirred", "egress", "redirect", "dev", TAP)
        self._run(
            *(["tc", "filter", "add", "dev"]), self._ifname, *["egress", "u32", "match", "u32", "0", "0"], *redirect
        )
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._run("tc", "qdisc", "del", "dev", self._ifname, "clsact")
        self._over.set()
        self._thread.join()
        self._out.close()
        os.close(self._tap)

    def _run(self, *command: str) -> None:
        with network_namespace_of(self._pid):
            subprocess.run(command, check=True)

    def _carry(self) -> None:
        waiting: list[tuple[float, int, bytes]] = []
        number = 0
        while not self._over.is_set():
            wait = min(0.05, max(0.0, waiting[0][0] - time.monotonic())) if waiting else 0.05
            select.select([self._tap], [], [], wait)
            for _ in range(64):
                try:
                    frame = os.read(self._tap, 65536)
                except BlockingIOError:
                    break
                for made in self._lie(frame):
                    number += 1
                    late = self.delay_s if self.late == 0 or self._random.random() >= self.late else self.delay_s + 0.02
                    heapq.heappush(waiting, (time.monotonic() + late, number, made))
            while waiting and waiting[0][0] <= time.monotonic():
                self._out.send(heapq.heappop(waiting)[2])

    def _lie(self, frame: bytes) -> list[bytes]:
        if self._random.random() < self.loss:
            return []
        if len(frame) > ETHERNET_HEADER + 40 and self._random.random() < self.corrupt:
            made = bytearray(frame)
            made[self._random.randrange(ETHERNET_HEADER + 28, len(made))] ^= 1 << self._random.randrange(8)
            frame = bytes(made)
        return [frame, frame] if self._random.random() < self.duplicate else [frame]
