"""How many packets a paced source has to have sent by when. Pure: times are ns since the source began.

The k-th packet is due when the source has been on for k packets' worth of its rate, so neither lateness nor the
beginnings and ends of bursts change the rate that it comes to.
"""

from collections.abc import Iterator

FOREVER = 1 << 62
_NS_PER_S = 1_000_000_000


class Pacer:
    """Of one flow: `take(now)` says how many packets to send, `next_ns` when to ask again."""

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
        """When the next packet is due, or a burst ends before it; FOREVER when there is none."""
        if self._start == FOREVER:
            return FOREVER
        on = -(-(self._taken + 1) * self._bits_ns // self._rate_bps)
        return min(self._start + on - self._on_before, self._end)
