"""What the links of a lab are now, for whoever waits on them: a file in the lab's record that workers map.

One row for each pair of datacenters with a route, and one for each datacenter whose fabric is limited. A change by
hand, by a ramp or by a replay is a few stores into memory: it may come a hundred times a second, and on a full disk.
docs/environment.md has the form; `workers.wire.link_table` reads it.
"""

import mmap
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.impairment import NS_PER_S, Impairment
from testbed.lab.fabric import LEAST_QUEUE_BYTES, QUEUE_NS
from testbed.links.base import DIRECTIONS, Direction
from testbed.topology.plan import DatacenterPlan, LabPlan

MAGIC = b"pddlink1"
ROW_WORDS = 8  # of 64 bits each, in the machine's byte order; the first row is the head
MOST = 2**62
PARTS = 16  # of a round trip: changes within one are held as one
SHORT_QUEUE_BYTES = 64 * 1500  # the least buffer of a link

Asked = Mapping[Direction, Impairment]
Pair = tuple[str, str]
Wait = tuple[int, int]
"""Round trip and queue of a link, both directions together, in ns."""


def wait_of(asked: Asked) -> Wait:
    """What a link's values make of a message and its answer. Jitter counts as queue: it comes on top of the delay."""
    rtt_ns = sum(asked[way].delay_ns for way in DIRECTIONS)
    return rtt_ns, sum(_queue_ns(asked[way], asked[way]) for way in DIRECTIONS)


def _queue_ns(filled: Impairment, drained: Impairment) -> int:
    """How long what the one's buffer holds takes to leave at the other's rate, the one's jitter included."""
    jitter_ns = filled.longest_delay_ns() - filled.delay_ns
    if filled.rate_bps is None:
        return jitter_ns
    return drained.serialization_ns(max(filled.queue_bytes or 0, SHORT_QUEUE_BYTES)) + jitter_ns


class _Before:
    """What a link was, as long as something of that time may be on its way."""

    def __init__(self) -> None:
        self._held: list[_Held] = []

    def hold(self, now_ns: int, was: Asked, becomes: Asked) -> None:
        rtt_ns, queue_ns = wait_of(was)
        # what waits in the buffer leaves at the new rate, and what has left it arrives as it would have
        queue_ns = max(queue_ns, sum(_queue_ns(was[way], becomes[way]) for way in DIRECTIONS))
        until_ns = now_ns + rtt_ns + queue_ns
        self._held = [held for held in self._held if held.until_ns > now_ns]
        last = self._held[-1] if self._held else None
        if last is None or not last.first_ns <= until_ns <= last.first_ns + (rtt_ns + queue_ns) // PARTS:
            self._held.append(last := _Held(until_ns, until_ns, 0, 0))
        last.until_ns = max(last.until_ns, until_ns)
        last.rtt_ns, last.queue_ns = max(last.rtt_ns, rtt_ns), max(last.queue_ns, queue_ns)

    def longest(self, now_ns: int) -> tuple[int, int, int]:
        """Round trip, queue, and until when they count."""
        held = [held for held in self._held if held.until_ns > now_ns]
        if not held:
            return 0, 0, 0
        return max(one.rtt_ns for one in held), max(one.queue_ns for one in held), max(one.until_ns for one in held)


@dataclass
class _Held:
    """One or more values that a link had, the longest of them, and until when; a ramp has thousands."""

    first_ns: int
    until_ns: int
    rtt_ns: int
    queue_ns: int


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
    """What the links are, and so the paths over them."""

    def __init__(self, plan: LabPlan) -> None:
        self.asked: dict[str, Asked] = {
            wan.name: {"forward": wan.forward, "backward": wan.backward} for wan in plan.wans
        }
        self.before = {wan.name: _Before() for wan in plan.wans}
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
            wan, asked = self._wans[name], self.asked[name]
            way: Direction = "forward" if at == wan.a else "backward"
            at = wan.b if at == wan.a else wan.a
            rate_bps = asked[way].rate_bps
            rates += [] if rate_bps is None else [rate_bps]
            rtt, queue = wait_of(asked)
            longest_rtt, longest_queue, until = self.before[name].longest(now_ns)
            rtt_ns, queue_ns, until_ns = rtt_ns + rtt, queue_ns + queue, max(until_ns, until)
            rtt_before, queue_before = rtt_before + max(rtt, longest_rtt), queue_before + max(queue, longest_queue)
        return rtt_ns, min(rates, default=None), queue_ns, rtt_before, queue_before, until_ns


class LinkTable:
    """The writer, for a lab's supervisor. Calls come one at a time. Raises OSError when there is no room for it."""

    def __init__(self, path: Path, plan: LabPlan) -> None:
        self._paths = _Paths(plan)
        self._rows = rows_of(plan)
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
        self._paths.before[link].hold(time.monotonic_ns(), self._paths.asked[link], asked)
        self._paths.asked[link] = dict(asked)
        for pair in self._crossing[link]:
            self._write(pair)

    def _write(self, pair: Pair) -> None:
        first = (self._rows[pair] + 1) * ROW_WORDS
        rtt_ns, rate_bps, queue_ns, rtt_before, queue_before, until_ns = self._paths.path(pair, time.monotonic_ns())
        # what came before first: a reader in between waits rather too long than too short
        for offset, value in ((3, rtt_before), (4, queue_before), (5, until_ns), (2, queue_ns), (0, rtt_ns)):
            self._words[first + offset] = min(value, MOST)
        self._words[first + 1] = rate_bps or 0
