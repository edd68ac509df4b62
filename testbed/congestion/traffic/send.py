"""The sending end of cross traffic: flows that are on and off by their seeds, from a given moment for a given time.

UDP leaves by the clock, in whatever is due each millisecond, so that its rate holds exactly; a flow slower than that
sends packet by packet. TCP takes what the link gives, or is paced by the kernel (SO_MAX_PACING_RATE) to its rate.
"""

import selectors
import socket
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from time import monotonic_ns
from typing import Any

from testbed.congestion.traffic.messages import BeSender, Sent
from testbed.congestion.traffic.pacing import FOREVER, Pacer, bursts

_TICK_NS = 1_000_000
_UDP_SEGMENT, _SO_MAX_PACING_RATE, _TCP_NOTSENT_LOWAT = 103, 47, 25
_IP_UDP_BYTES, _IP_TCP_BYTES = 28, 52  # TCP with time stamps
_LONGEST_UDP, _MOST_SEGMENTS = 65_000, 60
_CHUNK = 65_536
_TOTAL_RETRANS, _BYTES_ACKED = 100, 120  # in the kernel's struct tcp_info


class Flow(ABC):
    """One source. Times are ns since the flows began."""

    def __init__(self) -> None:
        self.sent_bytes = 0  # payload

    @abstractmethod
    def run(self, now: int, selector: selectors.BaseSelector) -> int:
        """Do what is due; returns when to be called again at the latest."""

    @abstractmethod
    def finish(self) -> dict[str, Any]:
        """Stop at once, and report."""


class UdpFlow(Flow):
    def __init__(self, number: int, target: tuple[str, int], mtu: int, rate_bps: int, on: Iterator[tuple[int, int]]):
        super().__init__()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.connect(target)
        self._socket.setblocking(False)
        self._payload = bytes([number]) + bytes(mtu - _IP_UDP_BYTES - 1)
        self._most = max(1, min(_MOST_SEGMENTS, _LONGEST_UDP // len(self._payload)))
        self._segment = [(socket.SOL_UDP, _UDP_SEGMENT, struct.pack("=H", len(self._payload)))]
        self._pacer = Pacer(on, rate_bps, mtu)
        self._packets = self._refused = 0
        self._latest_ns = 0

    def run(self, now: int, selector: selectors.BaseSelector) -> int:
        due_ns = self._pacer.next_ns
        due = self._pacer.take(now)
        if due:
            self._latest_ns = max(self._latest_ns, now - due_ns - _TICK_NS)
        while due:
            count = min(due, self._most)
            due -= count
            try:
                if count == 1:
                    self._socket.send(self._payload)
                else:
                    self._socket.sendmsg([self._payload * count], self._segment)
            except OSError:  # the socket's buffer is full, or the path is gone: as lost as any other
                self._refused += count
            else:
                self._packets += count
        return max(self._pacer.next_ns, now + _TICK_NS) if self._pacer.next_ns != FOREVER else FOREVER

    def finish(self) -> dict[str, Any]:
        self._socket.close()
        sent = {"packets": self._packets, "bytes": self._packets * len(self._payload)}
        return {**sent, "refused": self._refused, "latest_ns": self._latest_ns}


class TcpFlow(Flow):
    def __init__(
        self, number: int, target: tuple[str, int], mtu: int, rate_bps: int | None, on: Iterator[tuple[int, int]]
    ):
        super().__init__()
        self._number, self._target, self._on = number, target, on
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        lowat = 2 * _CHUNK
        if rate_bps is not None:
            bytes_per_s = max(1, rate_bps * (mtu - _IP_TCP_BYTES) // mtu // 8)
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", bytes_per_s))
            lowat = min(lowat, max(2 * mtu, bytes_per_s // 100))
        # Little waits in the socket, so that a burst ends when it ends.
        self._socket.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, lowat)
        self._chunk = bytes(min(_CHUNK, lowat))
        self._start, self._end = next(on, (FOREVER, FOREVER))
        self._connected = self._watched = False
        self._error = ""

    def run(self, now: int, selector: selectors.BaseSelector) -> int:
        while self._end <= now and self._end != FOREVER:
            self._start, self._end = next(self._on, (FOREVER, FOREVER))
        on = self._start <= now and not self._error
        if on and not self._connected:
            self._connected = True
            self._socket.connect_ex(self._target)
        if on != self._watched:
            self._watched = on
            if on:
                selector.register(self._socket, selectors.EVENT_WRITE, self)
            else:
                selector.unregister(self._socket)
        return FOREVER if self._error else self._end if on else self._start

    def write(self, selector: selectors.BaseSelector) -> None:
        """The socket takes more."""
        chunk = self._chunk if self.sent_bytes else bytes([self._number])
        try:
            self.sent_bytes += self._socket.send(chunk)
        except BlockingIOError:
            pass
        except OSError as error:
            self._error = error.strerror or str(error)
            self._watched = False
            selector.unregister(self._socket)

    def finish(self) -> dict[str, Any]:
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        acked = max(0, struct.unpack_from("=Q", info, _BYTES_ACKED)[0] - 1)  # the SYN counts
        (again,) = struct.unpack_from("=I", info, _TOTAL_RETRANS)
        # What is still unsent goes with the connection: a flow that has stopped sends nothing more.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("=ii", 1, 0))
        self._socket.close()
        return {"bytes": self.sent_bytes, "bytes_acked": acked, "retransmitted": again, "error": self._error}


def make_flows(wanted: BeSender) -> list[Flow]:
    """The flows of an order."""
    flows: list[Flow] = []
    target = (wanted.address, wanted.port)
    for number, seed in enumerate(wanted.seeds):
        on = bursts(seed, wanted.duration_ns, wanted.on_ns, wanted.off_ns)
        rate_bps = wanted.rate_bps
        if wanted.protocol == "udp":
            assert rate_bps is not None, "the timeline's check asks for it"
            flows.append(UdpFlow(number, target, wanted.mtu, rate_bps, on))
        else:
            flows.append(TcpFlow(number, target, wanted.mtu, rate_bps, on))
    return flows


def send(flows: list[Flow], start_ns: int, duration_ns: int) -> Sent:
    """Run the flows from `start_ns` (CLOCK_MONOTONIC) on, until they are over or standard input has something."""
    selector = selectors.SelectSelector()  # waits to the microsecond; epoll to the millisecond
    selector.register(sys.stdin, selectors.EVENT_READ, None)
    stopped = False
    while not stopped and monotonic_ns() < start_ns:
        stopped = _wait(selector, start_ns)
    began = monotonic_ns()
    due = [0] * len(flows)
    while not stopped and (now := monotonic_ns() - start_ns) < duration_ns:
        for number, flow in enumerate(flows):
            if due[number] <= now:
                due[number] = flow.run(now, selector)
        stopped = _wait(selector, start_ns + min(duration_ns, *due))
    ended = monotonic_ns()
    reports = [flow.finish() for flow in flows]
    return {
        "bytes": sum(report["bytes"] for report in reports),
        "late_ns": began - start_ns,
        "began_ns": began,
        "ended_ns": ended,
        "flows": reports,
    }


def _wait(selector: selectors.BaseSelector, until_ns: int) -> bool:
    """Wait until then, or until sockets take more; True when standard input has something, which means stop."""
    left_ns = until_ns - monotonic_ns()
    for key, _ in selector.select(max(0.0, left_ns / 1e9)):
        if key.data is None:
            return True
        key.data.write(selector)
    return False
