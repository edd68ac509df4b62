"""Mahimahi's packet-delivery traces: one line for each opportunity to deliver one packet of 1500 bytes, in ms.

As mm-link plays them (mahimahi, src/frontend/link_queue.cc): lines ascend, several may name the same millisecond, and
after the last line it begins again, that line's time being the period. Owns the counting and the arithmetic from
opportunities to rates; `read` owns the file.

An opportunity at time t is spread evenly over the bin of the granularity that ends at or after t, so within a bin
packets leave up to one bin early and evenly spaced, and over every bin the bytes are exactly the trace's.
"""

import re
from array import array

from testbed.model.trace import LEAST_RATE_BPS, MAX_CHANGES

OPPORTUNITY_BITS = 1500 * 8
MAX_BINS = 1_000_000  # while reading; equal neighbours become one change
_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_INTEGER = re.compile(rb"[0-9]{1,15}")


class Opportunities:
    """Counts the lines of a trace per bin. `add` raises ValueError with what is wrong with a line."""

    def __init__(self, granularity_ns: int) -> None:
        self._granularity_ns = granularity_ns
        self._counts = array("L")
        self._last_ms = -1
        self._lines = 0
        self._busiest = 0
        self.fastest_line = 1  # where the largest rate is reached

    @property
    def period_ns(self) -> int:
        return self._last_ms * _NS_PER_MS

    def add(self, line: bytes) -> None:
        """One line without its end. Raises ValueError."""
        self._lines += 1
        text = line.strip()
        if not _INTEGER.fullmatch(text):
            raise ValueError(_why_no_integer(text))
        at_ms = int(text)
        if at_ms < self._last_ms:
            raise ValueError(f"{at_ms} ms comes after {self._last_ms} ms; the times of a trace ascend")
        bin_ = max(0, at_ms * _NS_PER_MS - 1) // self._granularity_ns
        if bin_ >= MAX_BINS:
            seconds = MAX_BINS * self._granularity_ns / _NS_PER_S
            raise ValueError(
                f"{at_ms} ms is beyond the {seconds:,.0f} s that a replay holds ({MAX_BINS:,} steps of "
                f"{self._granularity_ns / _NS_PER_MS:g} ms); use a shorter trace or a larger granularity"
            )
        self._last_ms = at_ms
        if bin_ >= len(self._counts):
            self._counts.extend([0] * (bin_ + 1 - len(self._counts)))
        self._counts[bin_] += 1
        if self._counts[bin_] > self._busiest:
            self._busiest, self.fastest_line = self._counts[bin_], self._lines

    def rates(self) -> tuple["array[int]", "array[int]"]:
        """(starts, rates) of one period. Raises ValueError where there is no period or there are too many changes."""
        if self._last_ms < 0:
            raise ValueError("is empty; a trace has a line with a time in ms for each packet")
        if self._last_ms == 0:
            raise ValueError("ends at 0 ms; the last line is the trace's length")
        starts, rates = array("q"), array("q")
        owed = 0  # bits x 1e9 that rounding, or a bin without any opportunity, still owes (negative: is ahead)
        for number, count in enumerate(self._counts):
            start = number * self._granularity_ns
            span = min(self._granularity_ns, self.period_ns - start)
            owed += count * OPPORTUNITY_BITS * _NS_PER_S
            rate = max(LEAST_RATE_BPS, owed // span)
            owed -= rate * span
            if not rates or rate != rates[-1]:
                starts.append(start)
                rates.append(rate)
        if len(starts) > MAX_CHANGES:
            raise ValueError(
                f"comes to {len(starts):,} changes of the rate, more than the {MAX_CHANGES:,} that a replay holds; "
                "use a shorter trace or a larger granularity"
            )
        return starts, rates


def _why_no_integer(text: bytes) -> str:
    shown = text[:40].decode("ascii", errors="replace")
    if not text:
        return "an empty line; every line is a time in ms"
    if text.startswith(b"-"):
        return f'"{shown}" is negative; every line is a time in ms since the start'
    return f'"{shown}" is no whole number of ms (one line for each packet that can be delivered, such as 20)'
