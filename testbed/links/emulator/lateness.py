"""Lateness of one direction's packets, judged window by window: what was unfaithful once stays so. No I/O, no clock.

Late is what a packet waited beyond what the link is asked to do: before it was read from the device, as far as the
loop can bound it, and after its logical departure.
"""

from dataclasses import dataclass
from typing import Any

from testbed.links.emulator.histogram import Histogram

LATE_NS = 1_000_000
# No packet may be later than this. Shared machines stand still for 10 to 30 ms every few seconds, which delays less
# than a hundredth of the packets; so the shares below judge those.
LATEST_NS = 50_000_000
FEWEST_LATE = 3  # fewer are a moment, not a share


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `share` of the packets of a window may be late; it ends when it is that long and has enough packets."""

    share: float
    length_ns: int
    packets: int
    longest_ns: int  # ends with fewer packets too


LIMITS = (Limit(0.05, 1_000_000_000, 100, 10_000_000_000), Limit(0.01, 30_000_000_000, 1000, 120_000_000_000))


class _Window:
    """The packets of one limit's present window, as differences to where it began."""

    def __init__(self, limit: Limit, now: int, wall_s: float) -> None:
        self.limit = limit
        self.begin(now, wall_s, 0, 0)

    def begin(self, now: int, wall_s: float, count: int, late: int) -> None:
        self.began, self.wall_s, self._count, self._late = now, wall_s, count, late

    def late_of(self, count: int, late: int) -> tuple[int, int]:
        return late - self._late, count - self._count

    def has_ended(self, now: int, count: int) -> bool:
        lasted, limit = now - self.began, self.limit
        return lasted >= limit.longest_ns or (lasted >= limit.length_ns and count - self._count >= limit.packets)


class Lateness:
    """`add` each packet (or super-packet) as it leaves, and as it is read late; `judge` about once a second."""

    def __init__(self, now: int, wall_s: float = 0.0) -> None:
        self.forget(now, wall_s)

    def forget(self, now: int, wall_s: float) -> None:
        """All of it: figures and what was unfaithful."""
        self.histogram = Histogram()
        self._late = 0
        self._worst_ns = 0  # of the present short window
        self._windows: list[_Window] = [_Window(limit, now, wall_s) for limit in LIMITS]
        self._unfaithful: dict[str, Any] = {"windows": 0}

    def resume(self, now: int, wall_s: float) -> None:
        """New windows; the figures go on."""
        for window in self._windows:
            window.begin(now, wall_s, self.histogram.count, self._late)
        self._worst_ns = 0

    @property
    def max_ns(self) -> int:
        return self.histogram.max_ns

    def add(self, late_ns: int) -> None:
        """One packet was late by so much; nothing or less where it was punctual."""
        self.histogram.add(late_ns)
        if late_ns > LATE_NS:
            self._late += 1
            if late_ns > self._worst_ns:
                self._worst_ns = late_ns

    def judge(self, now: int, wall_s: float) -> None:
        """End every window that is over, or unfaithful already; `wall_s` is the time of `now` for people."""
        count = self.histogram.count
        for window in self._windows:
            late, packets = window.late_of(count, self._late)
            ended = window.has_ended(now, count)
            enough = packets if ended else max(packets, window.limit.packets)
            lasted = now - window.began >= window.limit.length_ns
            unfaithful = lasted and late >= FEWEST_LATE and late > window.limit.share * enough
            if window is self._windows[0]:
                unfaithful = unfaithful or self._worst_ns > LATEST_NS
            if unfaithful:
                self._note(window, wall_s, late, packets)
            if unfaithful or ended:
                window.begin(now, wall_s, count, self._late)
                if window is self._windows[0]:
                    self._worst_ns = 0

    def _note(self, window: _Window, wall_s: float, late: int, packets: int) -> None:
        told = {
            "from": window.wall_s,
            "to": wall_s,
            "packets": packets,
            "late": late,
            "worst_ns": self._worst_ns,
            "limit": window.limit.share,
        }
        noted = self._unfaithful
        noted["windows"] += 1
        noted.setdefault("first", told)
        noted["last"] = told
        if "worst" not in noted or told["worst_ns"] > noted["worst"]["worst_ns"]:
            noted["worst"] = told

    def summary(self) -> dict[str, Any]:
        """The histogram's figures; `unfaithful`: how many windows were, and the first, worst and last of them."""
        return {**self.histogram.summary(), "unfaithful": self._unfaithful if self._unfaithful["windows"] else None}
