"""Table of a lab's links as they are now, for whoever waits on them: a file in the lab's record that workers map.

One row for each pair of datacenters with a route, and one for each datacenter whose fabric is limited. A change by
hand, by a ramp or by a replay is a few stores into memory: it may come a hundred times a second, and on a full disk.
docs/environment.md has the form; `workers.wire.link_table` reads it.
"""

import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.lab.fabric import LEAST_QUEUE_BYTES, QUEUE_NS
from testbed.model.direction import DIRECTIONS, Direction
from testbed.model.impairment import NS_PER_S, Impairment
from testbed.model.plan import DatacenterPlan, LabPlan

MAGIC = b"pddlink1"
REFRESH_S = 0.25
ROW_WORDS = 8  # of 64 bits each, in the machine's byte order; the first row is the head
MOST = 2**62
PAUSE_NS = 50_000_000  # between two changes of a link that are written at once
MEAN_NS = NS_PER_S  # over which a rate counts
HOLDS_BPS = 10_000  # a slower link holds packets, as a replay says it: an outage, which moves no deadline
PARTS = 16  # of a round trip: changes within one are held as one
SHORT_QUEUE_BYTES = 64 * 1500  # the least buffer of a link

Asked = Mapping[Direction, Impairment]
Pair = tuple[str, str]


class _LinkNow:
    """One link: what it is asked, at which rates it drains its buffers, and what it was before, as long as something
    of that time may be on its way.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked = dict(asked)
        self._rates: dict[Direction, list[tuple[int, int | None]]] = {
            way: [(0, asked[way].rate_bps)] for way in DIRECTIONS
        }
        self._last_bps: dict[Direction, int | None] = {way: asked[way].rate_bps for way in DIRECTIONS}
        self._held: list[_Held] = []
        self.changed_ns = 0

    def change(self, now_ns: int, asked: Asked) -> None:
        """It is asked something else from now on."""
        self._hold(now_ns, asked)
        self.asked, self.changed_ns = dict(asked), now_ns
        for way in DIRECTIONS:
            self._rates[way].append((now_ns, asked[way].rate_bps))

    def rate_bps(self, way: Direction, now_ns: int) -> int | None:
        """The mean over the last second: a replay changes it fifty times in one, and holds packets now and then."""
        rates, begin_ns = self._rates[way], now_ns - MEAN_NS
        if len(rates) == 1 and self._last_bps[way] == rates[0][1]:
            return rates[0][1]
        while len(rates) > 1 and rates[1][0] <= begin_ns:
            del rates[0]
        if rates[-1][1] is None:
            return None
        ends = [at for at, _ in rates[1:]] + [now_ns]
        parts = [(end - max(at, begin_ns), rate) for (at, rate), end in zip(rates, ends, strict=True)]
        counted = [(span, rate) for span, rate in parts if rate is not None and rate > HOLDS_BPS and span > 0]
        if counted:
            total = sum(span for span, _ in counted)
            self._last_bps[way] = sum(span * rate for span, rate in counted) // total
        elif self._last_bps[way] is None:
            return rates[-1][1]
        return self._last_bps[way]

    def path(self, now_ns: int) -> tuple[int, int, int, int, int]:
        """Round trip and queue in ns, and of before the last changes these and until when they count."""
        held = [one for one in self._held if one.until_ns > now_ns]
        rtt_ns = _rtt_ns(self.asked)
        queue_ns = self._queue_ns(_sizes(self.asked), _jitter_ns(self.asked), now_ns)
        if not held:
            return rtt_ns, queue_ns, rtt_ns, queue_ns, 0
        sizes = [max(column) for column in zip(_sizes(self.asked), *(one.sizes for one in held), strict=True)]
        jitter_ns = max(_jitter_ns(self.asked), *(one.jitter_ns for one in held))
        before = max(rtt_ns, *(one.rtt_ns for one in held)), self._queue_ns(sizes, jitter_ns, now_ns)
        return rtt_ns, queue_ns, *before, max(one.until_ns for one in held)

    def _queue_ns(self, sizes: Sequence[int], jitter_ns: int, now_ns: int) -> int:
        drained = 0
        for way, size in zip(DIRECTIONS, sizes, strict=True):
            rate_bps = self.rate_bps(way, now_ns)
            drained += 0 if rate_bps is None else size * 8 * NS_PER_S // rate_bps
        return drained + jitter_ns

    def _hold(self, now_ns: int, becomes: Asked) -> None:
        rtt_ns, jitter_ns, sizes = _rtt_ns(self.asked), _jitter_ns(self.asked), _sizes(self.asked)
        drained_ns = 0
        for way, size in zip(DIRECTIONS, sizes, strict=True):  # what waits in the buffer leaves at the new rate
            rates = [self.rate_bps(way, now_ns), becomes[way].rate_bps]
            slowest = min((rate for rate in rates if rate is not None and rate > HOLDS_BPS), default=None)
            drained_ns += 0 if slowest is None else size * 8 * NS_PER_S // slowest
        until_ns = now_ns + rtt_ns + jitter_ns + drained_ns
        self._held = [held for held in self._held if held.until_ns > now_ns]
        last = self._held[-1] if self._held else None
        if last is None or not last.first_ns <= until_ns <= last.first_ns + (until_ns - now_ns) // PARTS:
            self._held.append(last := _Held(until_ns, until_ns, 0, 0, sizes))
        last.until_ns = max(last.until_ns, until_ns)
        last.rtt_ns, last.jitter_ns = max(last.rtt_ns, rtt_ns), max(last.jitter_ns, jitter_ns)
        last.sizes = [max(pair) for pair in zip(last.sizes, sizes, strict=True)]


@dataclass
class _Held:
    """One or more values that a link had, the longest of them, and until when; a ramp has thousands."""

    first_ns: int
    until_ns: int
    rtt_ns: int
    jitter_ns: int
    sizes: list[int]


def _rtt_ns(asked: Asked) -> int:
    return sum(asked[way].delay_ns for way in DIRECTIONS)


def _jitter_ns(asked: Asked) -> int:
    """Time that jitter may add to both delays: a queue, as far as a wait is concerned."""
    return sum(asked[way].longest_delay_ns() - asked[way].delay_ns for way in DIRECTIONS)


def _sizes(asked: Asked) -> list[int]:
    """Each direction's buffer in bytes."""
    return [max(asked[way].queue_bytes or 0, SHORT_QUEUE_BYTES) for way in DIRECTIONS]


def fabric_of(datacenter: DatacenterPlan) -> tuple[int, int | None, int]:
    """Round trip between two hosts of a datacenter, rate, and queue in both directions: see `fabric`."""
    rate_bps = datacenter.fabric_rate_bps
    queue_ns = 0 if rate_bps is None else 4 * max(QUEUE_NS, LEAST_QUEUE_BYTES * 8 * NS_PER_S // rate_bps)
    return 2 * datacenter.fabric_delay_ns, rate_bps, queue_ns


def rows_of(plan: LabPlan) -> dict[Pair, int]:
    """The row of each pair of datacenters; of a datacenter and itself where its fabric is limited."""
    pairs = [(route.datacenter, route.destination) for route in plan.routes]
    pairs += [(datacenter.name,) * 2 for datacenter in plan.datacenters if fabric_of(datacenter) != (0, None, 0)]
    return {pair: row for row, pair in enumerate(pairs)}


def paths_from(plan: LabPlan, datacenter: str) -> dict[str, dict[str, Any]]:
    """PDDBED_WAN of a datacenter's hosts: by the other's name, what the file says of the path and its row."""
    table = _Paths(plan)
    found = {}
    for (here, there), row in rows_of(plan).items():
        if here == datacenter:
            rtt_ns, rate_bps, queue_ns, *_ = table.path((here, there), 0)
            found[there] = {"rtt_ns": rtt_ns, "rate_bps": rate_bps, "queue_ns": queue_ns, "row": row}
    return found


class _Paths:
    """Paths over the links as they are."""

    def __init__(self, plan: LabPlan) -> None:
        self.links = {wan.name: _LinkNow({"forward": wan.forward, "backward": wan.backward}) for wan in plan.wans}
        self._wans = {wan.name: wan for wan in plan.wans}
        self._fabrics = {datacenter.name: fabric_of(datacenter) for datacenter in plan.datacenters}
        self._routes = {(route.datacenter, route.destination): route for route in plan.routes}

    def path(self, pair: Pair, now_ns: int) -> tuple[int, int | None, int, int, int, int]:
        """Round trip, rate and queue; round trip and queue of what came before, and until when they count."""
        here, there = pair
        if here == there:
            return *self._fabrics[here], 0, 0, 0
        fabrics = [self._fabrics[here], self._fabrics[there]]
        rates = [rate for _, rate, _ in fabrics if rate is not None]
        rtt_ns = rtt_before = sum(rtt for rtt, _, _ in fabrics)
        queue_ns = queue_before = sum(queue for _, _, queue in fabrics)
        until_ns, at = 0, here
        for name in self._routes[pair].links:
            wan, link = self._wans[name], self.links[name]
            rate_bps = link.rate_bps("forward" if at == wan.a else "backward", now_ns)
            at = wan.b if at == wan.a else wan.a
            rates += [] if rate_bps is None else [rate_bps]
            rtt, queue, longest_rtt, longest_queue, until = link.path(now_ns)
            rtt_ns, queue_ns, until_ns = rtt_ns + rtt, queue_ns + queue, max(until_ns, until)
            rtt_before, queue_before = rtt_before + longest_rtt, queue_before + longest_queue
        return rtt_ns, min(rates, default=None), queue_ns, rtt_before, queue_before, until_ns


class LinkTable:
    """The writer, for a lab's supervisor, called from any thread. Raises OSError when there is no room for the file."""

    def __init__(self, path: Path, plan: LabPlan) -> None:
        self._lock = threading.Lock()
        self._paths = _Paths(plan)
        self._rows = rows_of(plan)
        self._written_ns: dict[str, int] = {}
        self._crossing = {
            wan.name: [(route.datacenter, route.destination) for route in plan.routes if wan.name in route.links]
            for wan in plan.wans
        }
        size = 8 * ROW_WORDS * (1 + len(self._rows))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._map[: len(MAGIC)] = MAGIC
        self._words = memoryview(self._map).cast("q")
        for pair in self._rows:
            self._write(pair)

    def change(self, link: str, asked: Asked) -> None:
        """A link is asked something else from now on."""
        with self._lock:
            now_ns = time.monotonic_ns()
            self._paths.links[link].change(now_ns, asked)
            if now_ns >= self._written_ns.get(link, now_ns - PAUSE_NS) + PAUSE_NS:  # else `refresh` does
                self._written_ns[link] = now_ns
                self._write_paths_over(link)

    def refresh(self) -> None:
        """Write down what time alone changes after a change: to be called every `REFRESH_S` or so."""
        with self._lock:
            for name, link in self._paths.links.items():
                if time.monotonic_ns() <= link.changed_ns + 2 * MEAN_NS:
                    self._write_paths_over(name)

    def _write_paths_over(self, link: str) -> None:
        for pair in self._crossing[link]:
            self._write(pair)

    def _write(self, pair: Pair) -> None:
        first = (self._rows[pair] + 1) * ROW_WORDS
        rtt_ns, rate_bps, queue_ns, rtt_before, queue_before, until_ns = self._paths.path(pair, time.monotonic_ns())
        # what came before first: a reader in between waits rather too long than too short
        for offset, value in ((3, rtt_before), (4, queue_before), (5, until_ns), (2, queue_ns), (0, rtt_ns)):
            self._words[first + offset] = min(value, MOST)
        self._words[first + 1] = rate_bps or 0
