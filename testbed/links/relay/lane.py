"""One direction of the link: bottleneck, then the wire's delay, with the counters of both.

Owns the order of the stages. Times are passed in and frames are handed to `write`, so that all of it runs
without a device.
"""

from collections.abc import Callable
from typing import Any

from testbed.impairment import Impairment
from testbed.links.relay.bottleneck import FOREVER, Bottleneck
from testbed.links.relay.delayline import DelayLine
from testbed.links.relay.histogram import Histogram
from testbed.links.relay.packet import Frame, Malformed, NotIPv4, Packet

Write = Callable[[Frame], bool]  # False: the device refused it


class Lane:
    def __init__(self, impairment: Impairment, line_limit_bytes: int, write: Write, now: int) -> None:
        self._write = write
        self._bottleneck = Bottleneck(self._carry)
        self._line = DelayLine(line_limit_bytes)
        self.lateness = Histogram()
        self.packets = self.bytes = 0
        self.ignored_not_ipv4 = self.dropped_malformed = self.dropped_line = self.dropped_write = 0
        self.configure(impairment, line_limit_bytes, now)

    def configure(self, impairment: Impairment, line_limit_bytes: int, now: int) -> None:
        """Change the impairment at `now`. What is in flight keeps its departure time, and order is kept."""
        self._bottleneck.configure(impairment.rate_bps, impairment.queue_bytes, now)
        self.impairment = impairment
        self._delay_ns = impairment.delay_ns
        self._line.limit_bytes = line_limit_bytes

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

    def _carry(self, packet: Packet, first: int, last: int, at: int) -> None:
        """Segments first..last-1 left the bottleneck at `at`."""
        size = packet.bytes_of(first, last)
        if self._line.push(at + self._delay_ns, packet.cut(first, last), size):
            self.packets += last - first
            self.bytes += size
        else:
            self.dropped_line += last - first

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
        if head == FOREVER:
            # Nothing on the wire: the chunk in service comes next.
            return bottleneck.finish + self._delay_ns
        return head

    def applied(self) -> dict[str, Any]:
        """What this direction does from now on, limits included."""
        return {**self.impairment.to_dict(), "line_limit_bytes": self._line.limit_bytes}

    def counters(self) -> dict[str, int]:
        """Packets are MTU segments, bytes are IP bytes; `packets` counts what went onto the wire."""
        return {
            "packets": self.packets,
            "bytes": self.bytes,
            "dropped_queue": self._bottleneck.dropped,
            "dropped_unasked": self.dropped_line + self.dropped_write + self.dropped_malformed,
            "dropped_line": self.dropped_line,
            "dropped_write": self.dropped_write,
            "dropped_malformed": self.dropped_malformed,
            "ignored_not_ipv4": self.ignored_not_ipv4,
            "queued_bytes": self._bottleneck.queued_bytes,
            "queued_bytes_max": self._bottleneck.queued_bytes_max,
            "in_flight_frames": len(self._line),
        }
