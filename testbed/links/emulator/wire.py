"""The wire behind the bottleneck: loss, duplication and corruption per MTU segment, then delay and jitter.

Owns what is decided about each segment and when it departs. A super-packet is split only around segments
that something happens to. No I/O, no clock.
"""

from collections.abc import Mapping, Sequence
from random import Random

from testbed.links.emulator.chance import Hits, bernoulli_gaps, loss_gaps
from testbed.links.emulator.delayline import DelayLine
from testbed.links.emulator.jitter import JitterProcess
from testbed.links.emulator.packet import Frame, Packet, corrupted
from testbed.model.impairment import Impairment

_CHANCES = ("loss", "duplication", "corruption", "reordering")  # attributes of Impairment


class Wire:
    """`carry` takes what left the bottleneck; what survives waits in `line`. Counters are in segments."""

    def __init__(self, line: DelayLine, seed: str, impairment: Impairment, now: int) -> None:
        self.line = line
        self.packets = self.bytes = 0
        self.lost = self.duplicated = self.corrupted = self.reordered = self.dropped_line = 0
        # One generator a process: switching one impairment on leaves the others' decisions as they were.
        self._random = {name: Random(f"{seed}/{name}") for name in (*_CHANCES, "flip", "jitter")}
        self._hits: dict[str, Hits] = {}
        self._impairment: Impairment | None = None
        self.configure(impairment, now)

    def configure(self, impairment: Impairment, now: int) -> None:
        """From `now` on. A process whose parameters stay goes on where it was."""
        old, self._impairment = self._impairment, impairment
        for name in _CHANCES:
            value = getattr(impairment, name)
            if old is None or value != getattr(old, name):
                random = self._random[name]
                self._hits[name] = Hits(loss_gaps(value, random) if name == "loss" else bernoulli_gaps(value, random))
        self._untouched = not (
            impairment.loss or impairment.duplication or impairment.corruption or impairment.reordering
        )
        self._delay_ns = impairment.delay_ns
        self.overtakes = impairment.reordering > 0
        # No segment that enters the wire from now on departs sooner after:
        self.least_delay_ns = 0 if impairment.jitter or self.overtakes else impairment.delay_ns
        if impairment.jitter is None:
            self._jitter = None
        elif old is None or impairment.jitter != old.jitter:
            self._jitter = JitterProcess(impairment.jitter, self._random["jitter"], now)

    def carry(self, packet: Packet, first: int, last: int, at: int) -> None:
        """Segments first..last-1 enter the wire at `at`."""
        if self._untouched:
            if last - first == packet.segments:
                self._push(packet.data, packet.ip_bytes, last, at)
            else:
                self._send(packet, first, last, at)
            return
        hits = {name: process.among(last - first) for name, process in self._hits.items()}
        if any(hits.values()):
            first = self._touch(packet, first, hits, at)
        if first < last:
            self._send(packet, first, last, at)

    def _touch(self, packet: Packet, start: int, hits: Mapping[str, Sequence[int]], at: int) -> int:
        """Send up to and including the last segment that is hit (indices count from `start`); returns the next one."""
        first = start
        for index in sorted(set().union(*hits.values())):
            segment = start + index
            if first < segment:
                self._send(packet, first, segment, at)
            first = segment + 1
            if index in hits["loss"]:
                self.lost += 1
                continue
            frame = packet.cut(segment, first)
            if index in hits["corruption"]:
                frame = corrupted(frame, self._random["flip"])
                self.corrupted += 1
            early = index in hits["reordering"]
            self.reordered += early
            self._push(frame, packet.bytes_of(segment, first), 1, at, early)
            if index in hits["duplication"]:
                self.duplicated += 1
                self._push(frame, packet.bytes_of(segment, first), 1, at, early)
        return first

    def _send(self, packet: Packet, first: int, last: int, at: int) -> None:
        self._push(packet.cut(first, last), packet.bytes_of(first, last), last - first, at)

    def _push(self, frame: Frame, ip_bytes: int, segments: int, at: int, early: bool = False) -> None:
        if early:
            pushed = self.line.push_early(at, frame, ip_bytes)
        elif self._jitter is None:
            pushed = self.line.push(at + self._delay_ns, frame, ip_bytes)
        else:
            pushed = self.line.push(at + max(0, self._delay_ns + self._jitter.offset_ns(at)), frame, ip_bytes)
        if pushed:
            self.packets += segments
            self.bytes += ip_bytes
        else:
            self.dropped_line += segments
