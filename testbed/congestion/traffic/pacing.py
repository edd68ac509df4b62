"""The times at which a source of cross traffic sends: seeded bursts and pauses, and a pace within bursts. Pure.

Bursts and pauses have exponentially distributed lengths, an interrupted Poisson process (Kuczura 1973): a seed gives
the same bursts on every machine. The source is on at first with the share of time that it is on in the long run, so
that the mean rate holds from the beginning. The k-th packet is due when the source has been on for k packets' worth of
its rate, so neither lateness nor the ends of bursts change the rate. Times are ns since the source began.
"""

import random
from collections.abc import Iterator

FOREVER = 1 << 62
_NS_PER_S = 1_000_000_000


class Pacer:
    """The pace of one flow: `take(now)` gives the number of packets to send, `next_ns` the time to ask again."""

    def __init__(self, bursts: Iterator[tuple[int, int]], rate_bps: int, packet_bytes: int) -> None:
        self._bursts = bursts
        self._rate_bps = rate_bps
        self._bits_ns = packet_bytes * 8 * _NS_PER_S  # of one packet, x 1e9
        self._taken = 0
        self._on_before = 0  # ns that the source was on before this burst
        self._start, self._end = next(bursts, (FOREVER, FOREVER))

    def take(self, now: int) -> int:
        """Packets that are due by `now` and were not taken yet."""
        while self._end <= now and self._end != FOREVER:
            self._on_before += self._end - self._start
            self._start, self._end = next(self._bursts, (FOREVER, FOREVER))
        on = self._on_before + max(0, now - self._start)
        due = on * self._rate_bps // self._bits_ns - self._taken
        self._taken += due
        return due

    @property
    def next_ns(self) -> int:
        """The time at which the next packet is due, or a burst ends before it; FOREVER when there is none."""
        if self._start == FOREVER:
            return FOREVER
        on = -(-(self._taken + 1) * self._bits_ns // self._rate_bps)
        return min(self._start + on - self._on_before, self._end)


def burst_seed(seed: int, event: int, occurrence: int, target: int, flow: int) -> str:
    """The seed of a flow's bursts, from the lab's seed and the flow's place in the timeline."""
    return f"pddbed congestion {seed} {event} {occurrence} {target} {flow}"


def bursts(seed: str, duration_ns: int, on_ns: int | None, off_ns: int | None) -> Iterator[tuple[int, int]]:
    """(start, end) of every burst within a duration, ascending and apart; the whole of it without mean lengths."""
    if on_ns is None or off_ns is None:
        yield 0, duration_ns
        return
    chance = random.Random(seed)
    on = chance.random() < on_ns / (on_ns + off_ns)
    at = 0
    while at < duration_ns:
        length = max(1, round(chance.expovariate(1 / (on_ns if on else off_ns))))
        if on:
            yield at, min(at + length, duration_ns)
        at += length
        on = not on
