"""One direction of the link: bottleneck, then wire, then the device, with the counters of all.

Owns the order of the stages. Times are passed in and frames are handed to `write`, so that all of it runs
without a device.
"""

from collections.abc import Callable
from typing import Any

from testbed.links.base import LinkCounters
from testbed.links.emulator.bottleneck import FOREVER, Bottleneck
from testbed.links.emulator.delayline import DelayLine
from testbed.links.emulator.lateness import Lateness
from testbed.links.emulator.packet import Frame, Malformed, NotIPv4, Packet
from testbed.links.emulator.wire import Wire
from testbed.model.impairment import Impairment

Write = Callable[[Frame], bool]  # False: the device refused it


class Lane:
    """`seed` names the random decisions: the same text and the same packets give the same decisions."""

    def __init__(self, impairment: Impairment, line_limit_bytes: int, write: Write, now: int, seed: str = "") -> None:
        self._write = write
        self._line = DelayLine(line_limit_bytes)
        self._wire = Wire(self._line, seed, impairment, now)
        self._bottleneck = Bottleneck(self._wire.carry)
        self._books = {measuring: Lateness(now) for measuring in (False, True)}
        self.lateness = self._books[False]
        self.ignored_not_ipv4 = self.dropped_malformed = self.dropped_write = 0
        self.configure(impairment, line_limit_bytes, now)

    def configure(self, impairment: Impairment, line_limit_bytes: int, now: int) -> None:
        """Change the impairment at `now`. What is in flight keeps its departure time, and order is kept."""
        self._bottleneck.advance(now)  # what has left it by now crosses the wire as it was
        self._wire.configure(impairment, now)
        self._bottleneck.configure(impairment.rate_bps, impairment.queue_bytes, impairment.codel, now)
        self.impairment = impairment
        # What is in flight came under the old limit, and must not crowd out what comes now.
        self._line.limit_bytes = line_limit_bytes + self._line.held_bytes

    def arrive(self, data: bytes, now: int) -> None:
        """A packet was read from the device at `now`."""
        try:
            packet = Packet(data)
        except NotIPv4:
            self.ignored_not_ipv4 += 1
            return
        except Malformed:
            self.dropped_malformed += 1
            return
        bottleneck = self._bottleneck
        if bottleneck.finish <= now:
            bottleneck.advance(now)
        bottleneck.offer(packet, now)

    def emit(self, now: int, clock: Callable[[], int]) -> int:
        """Write what is due; returns when to come back at the latest (FOREVER: when a packet arrives)."""
        bottleneck, line = self._bottleneck, self._line
        if bottleneck.finish <= now:
            bottleneck.advance(now)
        while (head := line.head) <= now:
            at, frame = line.pop()
            now = clock()
            self.lateness.add(now - at)
            if not self._write(frame):
                self.dropped_write += 1
            if bottleneck.finish <= now:
                bottleneck.advance(now)
        if head == FOREVER or self._wire.overtakes:
            # The chunk in service may come next.
            return min(head, bottleneck.finish + self._wire.least_delay_ns)
        return head

    def measure(self, measuring: bool, now: int, wall_s: float) -> None:
        """From `now` on `pddbed verify` loads the link, or no longer does: what is late then has a book of its own."""
        self.lateness.judge(now, wall_s)
        self.lateness = self._books[measuring]
        self.lateness.resume(now, wall_s)

    def late(self, now: int, wall_s: float) -> dict[str, Any]:
        """Lateness of packets so far; `measuring`: those while `pddbed verify` loaded the link."""
        self.lateness.judge(now, wall_s)
        return {**self._books[False].summary(), "measuring": self._books[True].summary()}

    def forget(self, now: int, wall_s: float) -> None:
        """Forget how late packets were so far."""
        for book in self._books.values():
            book.forget(now, wall_s)

    def applied(self) -> dict[str, Any]:
        """Values of this direction from now on, limits included."""
        return {**self.impairment.to_dict(), "line_limit_bytes": self._line.limit_bytes}

    def counters(self) -> LinkCounters:
        """Packets are MTU segments, bytes are IP bytes; `packets` counts what went onto the wire."""
        bottleneck, wire = self._bottleneck, self._wire
        return {
            "packets": wire.packets,
            "bytes": wire.bytes,
            "dropped_queue": bottleneck.dropped_tail + bottleneck.dropped_codel,
            "dropped_codel": bottleneck.dropped_codel,
            "lost": wire.lost,
            "duplicated": wire.duplicated,
            "corrupted": wire.corrupted,
            "reordered": wire.reordered,
            "dropped_unasked": wire.dropped_line + self.dropped_write + self.dropped_malformed,
            "dropped_line": wire.dropped_line,
            "dropped_write": self.dropped_write,
            "dropped_malformed": self.dropped_malformed,
            "ignored_not_ipv4": self.ignored_not_ipv4,
            "queued_bytes": bottleneck.queued_bytes,
            "queued_bytes_max": bottleneck.queued_bytes_max,
            "in_flight_frames": len(self._line),
        }
