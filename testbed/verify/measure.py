"""Measurements of one direction of a WAN link, between the link's own end hosts. No judgement here.

Owns what is sent and how it is timed. Every method is bounded in time and packets.
"""

import math
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from testbed.impairment import Impairment
from testbed.netns import network_namespace_of
from testbed.verify.stamps import SMALLEST_PROBE, Arrival, ProbePath

TCP_HEADERS = 52  # IPv4 20, TCP 20, timestamps 12
# A train must last long against the jitter of stamps, and fit into the bottleneck's buffer.
TRAIN_NS = 40_000_000
TRAIN_PACKETS = 60
# Beyond this, separate UDP packets measure how fast this machine sends them rather than the link.
MAX_TRAIN_RATE_BPS = 1_000_000_000
OVERLOAD = 1.3  # of the rate, while a buffer is being filled
MAX_BURST = 8  # packets
MAX_QUEUE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Ends:
    """A direction's two hosts: pids in their namespaces and the receiver's address."""

    source_pid: int
    target_pid: int
    target_address: str


@dataclass(frozen=True, slots=True)
class Delays:
    """One-way delays of sparse probes, in ns; `lost` of `sent` did not arrive."""

    delays_ns: tuple[int, ...]
    sent: int

    @property
    def lost(self) -> int:
        return self.sent - len(self.delays_ns)

    def quantile(self, share: float) -> int:
        ordered = sorted(self.delays_ns)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def median_ns(self) -> int:
        return int(statistics.median(self.delays_ns))

    @property
    def mean_ns(self) -> float:
        return statistics.fmean(self.delays_ns)

    @property
    def std_ns(self) -> float:
        return statistics.pstdev(self.delays_ns)


def delays(ends: Ends, asked: Impairment, count: int, interval_ns: int) -> Delays:
    """Sparse probes: each finds an empty queue."""
    with ProbePath(ends.source_pid, ends.target_pid, ends.target_address) as path:
        arrivals = path.send_evenly(count, interval_ns)
        arrivals += path.collect(count - len(arrivals), _patience_s(asked))
    return Delays(tuple(arrival.delay_ns for arrival in arrivals), count)


def train_rate_bps(ends: Ends, asked: Impairment, mtu: int) -> float | None:
    """Rate of the bottleneck from the spacing of a train of MTU packets; None where that cannot tell.

    The first half of the train fills the buffer's head and is left out, so that the sender's own pace does not show.
    """
    if asked.rate_bps is None or asked.rate_bps > MAX_TRAIN_RATE_BPS:
        return None
    packets = max(TRAIN_PACKETS, TRAIN_NS * asked.rate_bps // (8 * 10**9 * mtu))
    room = (asked.queue_bytes or 0) * 9 // 10 // mtu
    packets = min(packets, max(2, room))
    with ProbePath(ends.source_pid, ends.target_pid, ends.target_address) as path:
        path.send_train(packets, mtu)
        arrivals = path.collect(packets, _patience_s(asked) + packets * asked.serialization_ns(mtu) / 1e9)
    return spacing_rate_bps(arrivals, mtu)


def spacing_rate_bps(arrivals: Sequence[Arrival], ip_bytes: int) -> float | None:
    """Bits per second by the spacing of the second half of a train; None when too little of it arrived."""
    half = sorted(arrivals, key=lambda arrival: arrival.sequence)[len(arrivals) // 2 :]
    if len(half) < 2:
        return None
    span_ns = half[-1].received_ns - half[0].received_ns
    return None if span_ns <= 0 else (half[-1].sequence - half[0].sequence) * ip_bytes * 8e9 / span_ns


def losses(ends: Ends, asked: Impairment, count: int, share: float = 0.3) -> list[bool]:
    """For each of `count` small probes at `share` of the rate (at most 20,000 a second): whether it was lost."""
    interval_ns = max(50_000, math.ceil(asked.serialization_ns(SMALLEST_PROBE) / share))
    with ProbePath(ends.source_pid, ends.target_pid, ends.target_address) as path:
        arrivals = path.send_evenly(count, interval_ns)
        arrivals += path.collect(count - len(arrivals), _patience_s(asked))
    arrived = {arrival.sequence for arrival in arrivals}
    return [sequence not in arrived for sequence in range(count)]


@dataclass(frozen=True, slots=True)
class Overload:
    """What a link that was offered too much carried: its rate, and the depth of the buffer that filled up."""

    rate_bps: float | None
    queue_bytes: int


def overload(ends: Ends, asked: Impairment, mtu: int) -> Overload | None:
    """Fill the bottleneck's buffer. Its depth is how much longer a packet waits in the fullest than in an empty one.

    The rate is exceeded by 30 % until the buffer must be full: a burst at once would also measure how long this
    machine takes to carry it to the bottleneck. None without a rate, and for buffers that take too much to fill.
    """
    if asked.rate_bps is None or asked.queue_bytes is None:
        return None
    if asked.rate_bps > MAX_TRAIN_RATE_BPS or asked.queue_bytes > MAX_QUEUE_BYTES:
        return None
    packets = int(asked.queue_bytes / mtu * OVERLOAD / (OVERLOAD - 1) * 1.2) + TRAIN_PACKETS
    burst = max(1, min(MAX_BURST, packets // 100))
    interval_ns = int(burst * asked.serialization_ns(mtu) / OVERLOAD)
    with ProbePath(ends.source_pid, ends.target_pid, ends.target_address) as path:
        arrivals: list[Arrival] = []
        start = time.monotonic_ns()
        for index in range(packets // burst):
            pause_ns = start + index * interval_ns - time.monotonic_ns()
            if pause_ns > 0:
                time.sleep(pause_ns / 1e9)
            path.send_train(burst, mtu)
            arrivals += path.arrivals()
        arrivals += path.collect(path.sent - len(arrivals), _patience_s(asked) + 0.2)
    if len(arrivals) < 2:
        return None
    waits = [arrival.delay_ns for arrival in arrivals]
    depth = int((max(waits) - min(waits)) * asked.rate_bps / 8e9)
    return Overload(arrival_rate_bps(arrivals, mtu), depth)


def arrival_rate_bps(arrivals: Sequence[Arrival], ip_bytes: int) -> float | None:
    """Bits per second of the second half of what arrived, lost packets in between not counted."""
    half = sorted(arrivals, key=lambda arrival: arrival.received_ns)[len(arrivals) // 2 :]
    span_ns = half[-1].received_ns - half[0].received_ns if half else 0
    return None if span_ns <= 0 else (len(half) - 1) * ip_bytes * 8e9 / span_ns


def tcp_goodput_bps(ends: Ends, warm_s: float, measure_s: float) -> float | None:
    """Payload bits per second that arrive during `measure_s`, after `warm_s` of the same flow; None when it broke."""
    with network_namespace_of(ends.target_pid):
        listener = socket.create_server((ends.target_address, 0))
    with network_namespace_of(ends.source_pid):
        sender = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with listener, sender:
        listener.settimeout(30 + warm_s)
        sender.settimeout(30 + warm_s)
        sending = threading.Thread(target=_pour, args=(sender, listener.getsockname(), warm_s + measure_s), daemon=True)
        sending.start()
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(30 + warm_s)
            rate = _receive_rate_bps(connection, warm_s, measure_s)
        sending.join(timeout=5)
    return rate


def _pour(sender: socket.socket, address: tuple[str, int], seconds: float) -> None:
    chunk = memoryview(bytes(1 << 20))
    try:
        sender.connect(address)
        end = time.monotonic() + seconds + 10
        while time.monotonic() < end:
            sender.sendall(chunk)
    except OSError:  # the receiver has measured enough and closed
        pass


def _receive_rate_bps(connection: socket.socket, warm_s: float, measure_s: float) -> float | None:
    buffer = bytearray(4 << 20)
    first = connection.recv_into(buffer)
    if not first:
        return None
    start = time.monotonic() + warm_s
    received, began, now = 0, 0.0, 0.0
    while True:
        count = connection.recv_into(buffer)
        if not count:
            return None
        now = time.monotonic()
        if now < start:
            continue
        if not began:
            began = now  # this chunk arrived before the window
            continue
        received += count
        if now - began >= measure_s:
            return received * 8 / (now - began)


def _patience_s(asked: Impairment) -> float:
    """How long silence may last before what is missing counts as lost."""
    queue_ns = asked.serialization_ns(asked.queue_bytes or 0)
    return (asked.longest_delay_ns() + queue_ns) / 1e9 + 0.25
