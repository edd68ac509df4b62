"""Measurements of one direction of a WAN link, between the link's own end hosts. No judgement here.

Owns what is sent and how it is timed. Every method is bounded in time and packets.
"""

import math
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

from testbed.machine.netns import network_namespace_of
from testbed.model.impairment import Impairment
from testbed.verify.stamps import SMALLEST_PROBE, Arrival, ProbePath

TCP_HEADERS = 52  # IPv4 20, TCP 20, timestamps 12
# A train must last long against the jitter of stamps, and fit into the bottleneck's buffer.
TRAIN_NS = 40_000_000
TRAIN_PACKETS = 60
# On slow links fewer do: each takes long.
LONGEST_TRAIN_NS, FEWEST_TRAIN_PACKETS = 2_000_000_000, 8
# Beyond this, separate UDP packets measure how fast this machine sends them rather than the link.
MAX_TRAIN_RATE_BPS = 1_000_000_000
PATHS_APART_NS = 200_000  # between probes of different paths: several times what the emulator takes for one
OVERLOAD = 1.3  # of the rate, while a buffer is being filled
LEAST_OVERLOAD = 1.15  # what of it this machine must have managed to send,
OFFERS = 3  # in one of so many goes: a busy machine is no fault of the link
MAX_BURST = 8  # packets
MAX_QUEUE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Ends:
    """A direction's two hosts: pids in their namespaces and the receiver's address."""

    source_pid: int
    target_pid: int
    target_address: str


@dataclass(frozen=True)
class Probes:
    """Outcome of `sent` probes: every arrival in its order, those of duplicates too, and how many were corrupted."""

    sent: int
    arrivals: tuple[Arrival, ...]
    corrupted: int = 0

    @cached_property
    def first(self) -> dict[int, Arrival]:
        """The first arrival of each probe that came."""
        found: dict[int, Arrival] = {}
        for arrival in self.arrivals:
            found.setdefault(arrival.sequence, arrival)
        return found

    @property
    def delays_ns(self) -> list[int]:
        return [arrival.delay_ns for arrival in self.first.values()]

    @property
    def median_ns(self) -> float | None:
        return median(self.delays_ns) if self.first else None

    @property
    def duplicates(self) -> int:
        return len(self.arrivals) - len(self.first)

    def overtaken(self) -> int:
        """Probes that came after one that was sent later."""
        last, count = -1, 0
        for sequence in self.first:
            count += sequence < last
            last = max(last, sequence)
        return count

    def missing(self) -> list[bool]:
        """For each probe whether it never came; of those, one is taken off for each that came corrupted."""
        lost = [sequence not in self.first for sequence in range(self.sent)]
        left = self.corrupted
        for sequence, gone in enumerate(lost):
            if gone and left:
                lost[sequence] = False
                left -= 1
        return lost


def probe(ends: Ends, asked: Impairment, count: int, interval_ns: int, ip_bytes: int = SMALLEST_PROBE) -> Probes:
    """Sparse probes, so that each finds an empty queue; without checksums, so that a flipped bit is seen."""
    with ProbePath(ends.source_pid, ends.target_pid, ends.target_address, unchecked=True) as path:
        arrivals = path.send_evenly(count, interval_ns, ip_bytes)
        arrivals += path.collect(patience_s(asked))
        return Probes(count, tuple(arrivals), path.corrupted)


def probe_together(paths: Sequence[Ends], asked: Sequence[Impairment], rounds: int, interval_ns: int) -> list[Probes]:
    """`probe`, of several paths at once: one probe each in each of `rounds`, evenly apart, so that none waits for
    another's."""
    apart_ns = max(PATHS_APART_NS, interval_ns // max(1, len(paths)))
    with ExitStack() as stack:
        opened = [
            stack.enter_context(ProbePath(ends.source_pid, ends.target_pid, ends.target_address, unchecked=True))
            for ends in paths
        ]
        begin = time.monotonic_ns()
        for number in range(rounds * len(opened)):
            pause_ns = begin + number * apart_ns - time.monotonic_ns()
            if pause_ns > 0:
                time.sleep(pause_ns / 1e9)
            opened[number % len(opened)].send()
        patience = max(map(patience_s, asked), default=0.25)
        return [Probes(path.sent, tuple(path.collect(patience)), path.corrupted) for path in opened]


def sparse_interval_ns(asked: Impairment, least_ns: int, ip_bytes: int = SMALLEST_PROBE, share: float = 0.3) -> int:
    """Between probes, so that they take at most `share` of the rate."""
    return max(least_ns, math.ceil(asked.serialization_ns(ip_bytes) / share))


def train(ends: Ends, asked: Impairment, mtu: int) -> Probes | None:
    """A train of MTU packets that fits into the bottleneck's buffer; None where its spacing cannot tell the rate, and
    where this machine was too busy to send it without gaps."""
    if asked.rate_bps is None or asked.rate_bps > MAX_TRAIN_RATE_BPS:
        return None
    packets = max(TRAIN_PACKETS, TRAIN_NS * asked.rate_bps // (8 * 10**9 * mtu))
    packets = min(packets, max(FEWEST_TRAIN_PACKETS, LONGEST_TRAIN_NS * asked.rate_bps // (8 * 10**9 * mtu)))
    packets = min(packets, max(2, (asked.queue_bytes or 0) * 9 // 10 // mtu))
    for _ in range(OFFERS):
        with ProbePath(ends.source_pid, ends.target_pid, ends.target_address) as path:
            path.send_train(packets, mtu)
            arrivals = path.collect(patience_s(asked) + packets * asked.serialization_ns(mtu) / 1e9)
            probes = Probes(packets, tuple(arrivals), path.corrupted)
        if not has_gaps(probes, asked, mtu):
            return probes
    return None


def has_gaps(probes: Probes, asked: Impairment, mtu: int) -> bool:
    """True when a train seems slower than the link is asked to be because its sender paused: packets of its second half
    then found an empty buffer, where those of a train without gaps wait for all before them."""
    ordered = [probes.first[number].delay_ns for number in sorted(probes.first)]
    rate_bps = spacing_rate_bps(probes.arrivals, mtu, overtaking=asked.reordering > 0)
    if asked.rate_bps is None or rate_bps is None or asked.reordering or rate_bps > 0.98 * asked.rate_bps:
        return False
    half = len(ordered) // 2
    return min(ordered[half:]) - min(ordered) < half * asked.serialization_ns(mtu) // 4


def spacing_rate_bps(arrivals: Sequence[Arrival], ip_bytes: int, overtaking: bool = False) -> float | None:
    """Bits per second by the spacing of the second half of a train; None when too little of it arrived.

    The first half fills the buffer's head and is left out, so that the sender's own pace does not show. `overtaking`:
    some packets come early, as asked.
    """
    half = sorted(arrivals, key=lambda arrival: arrival.sequence)[len(arrivals) // 2 :]
    points = [(arrival.sequence, arrival.received_ns) for arrival in half]
    spacing = median_spacing_ns(points) if overtaking else spacing_ns(points)
    return None if spacing is None else ip_bytes * 8e9 / spacing


def median_spacing_ns(points: Sequence[tuple[int, int]]) -> float | None:
    """As `spacing_ns`, where some packets are early: the median of what many pairs say."""
    apart = len(points) // 2
    pairs = zip(points, points[apart:], strict=False) if apart else ()
    slopes = [(later[1] - sooner[1]) / (later[0] - sooner[0]) for sooner, later in pairs]
    spacing = median(slopes) if slopes else 0.0
    return spacing if spacing > 0 else None


def spacing_ns(points: Sequence[tuple[int, int]]) -> float | None:
    """Time from one packet to the next, of (number, time) with rising numbers; None where they cannot tell.

    A busy machine makes packets late and none early, so the line goes through the least late packet of either half.
    """
    if len(points) < 2:
        return None
    middle = len(points) // 2
    first, last = points[0], points[-1]
    for _ in range(10):
        spacing = (last[1] - first[1]) / (last[0] - first[0])
        before = min(points[:middle], key=lambda point: point[1] - point[0] * spacing)
        after = min(points[middle:], key=lambda point: point[1] - point[0] * spacing)
        if (before, after) == (first, last):
            break
        first, last = before, after
    return spacing if spacing > 0 else None


@dataclass(frozen=True, slots=True)
class Overload:
    """Traffic that a link which was offered too much carried: its rate, and the depth of the buffer that filled up."""

    rate_bps: float | None
    queue_bytes: int
    span_ns: int  # over which the rate was taken


def overload(ends: Ends, asked: Impairment, mtu: int) -> Overload | None:
    """Fill the bottleneck's buffer. Its depth is how much longer a packet waits in the fullest than in an empty one.

    The rate is exceeded by 30 % until the buffer must be full: a burst at once would also measure how long this
    machine takes to carry it to the bottleneck. None without a rate, for buffers that take too much to fill, and where
    this machine was too busy to send so much: then nothing was overloaded.
    """
    if asked.rate_bps is None or asked.queue_bytes is None:
        return None
    if asked.rate_bps > MAX_TRAIN_RATE_BPS or asked.queue_bytes > MAX_QUEUE_BYTES:
        return None
    for _ in range(OFFERS):
        arrivals, offered_bps = _offer_too_much(ends, asked, mtu)
        if offered_bps > LEAST_OVERLOAD * asked.rate_bps:
            break
    else:
        return None
    if len(arrivals) < 2:
        return None
    waits = [arrival.delay_ns for arrival in arrivals]
    # The last to arrive found the buffer full, as far as bursts let them; one that a busy machine made late is not it.
    full = quantile(waits[-max(2, len(waits) // 10) :], 0.75)
    depth = int((full - min(waits)) * asked.rate_bps / 8e9)
    half = sorted(arrival.received_ns for arrival in arrivals)[len(arrivals) // 2 :]
    spacing = spacing_ns(list(enumerate(half)))
    return Overload(None if spacing is None else mtu * 8e9 / spacing, depth, half[-1] - half[0])


def _offer_too_much(ends: Ends, asked: Impairment, mtu: int) -> tuple[list[Arrival], float]:
    """Packets that arrived, and the rate at which this machine really sent, in its slower half."""
    packets = int((asked.queue_bytes or 0) / mtu * OVERLOAD / (OVERLOAD - 1) * 1.2) + TRAIN_PACKETS
    burst = max(1, min(MAX_BURST, packets // 100))
    interval_ns = int(burst * asked.serialization_ns(mtu) / OVERLOAD)
    bursts = packets // burst
    with ProbePath(ends.source_pid, ends.target_pid, ends.target_address) as path:
        arrivals: list[Arrival] = []
        start = half = time.monotonic_ns()
        for index in range(bursts):
            pause_ns = start + index * interval_ns - time.monotonic_ns()
            if pause_ns > 0:
                time.sleep(pause_ns / 1e9)
            path.send_train(burst, mtu)
            arrivals += path.arrivals()
            if index == bursts // 2:
                half = time.monotonic_ns()
        end = time.monotonic_ns()
        arrivals += path.collect(patience_s(asked) + 0.2)
    slower_ns = max(half - start, end - half, 1)
    return arrivals, (bursts // 2) * burst * mtu * 8e9 / slower_ns


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


def patience_s(asked: Impairment) -> float:
    """Time that silence may last before what is missing counts as lost."""
    queue_ns = asked.serialization_ns(asked.queue_bytes or 0)
    return (asked.longest_delay_ns() + queue_ns) / 1e9 + 0.25


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


median, mean, deviation = statistics.median, statistics.fmean, statistics.pstdev
