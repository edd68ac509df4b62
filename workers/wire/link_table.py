"""The present state of a lab's links: a file that the lab keeps up to date and every worker maps (docs/environment.md).

Read with each deadline, at the cost of a few loads; nothing is sent, and nothing has to arrive first. The file is
there before the workers are, and never changes its size.
"""

import mmap
import os
import time

from workers.wire.deadlines import Link

MAGIC = b"pddlink1"
ROW_WORDS = 8  # of 64 bits each, in the machine's byte order; row 0 is the head


class LinkTable:
    """The mapped file. Raises OSError, and ValueError when it is something else."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        if self._map[: len(MAGIC)] != MAGIC or len(self._map) % (8 * ROW_WORDS):
            raise ValueError("it is not a table of links")
        self._words = memoryview(self._map).cast("q")
        self.rows = len(self._words) // ROW_WORDS - 1

    def link(self, row: int) -> "PresentLink":
        """The link of one row, from 0. Raises ValueError for one that is not there."""
        if not 0 <= row < self.rows:
            raise ValueError(f"it has {self.rows} rows, and none of number {row}")
        return PresentLink(self._words[(row + 1) * ROW_WORDS : (row + 2) * ROW_WORDS])


class PresentLink:
    """One row: round trip, rate (0: no limit), queue; until a moment of CLOCK_MONOTONIC, round trip and queue of what
    may still be on its way from before a change. All in ns and bit/s.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def now(self) -> Link:
        rtt_ns, rate_bps, queue_ns = self._words[0], self._words[1], self._words[2]
        return Link(rtt_ns, rate_bps or None, queue_ns)

    def longest(self) -> Link:
        words, now = self._words, self.now()
        if words[5] <= time.monotonic_ns():
            return now
        return now._replace(rtt_ns=max(now.rtt_ns, words[3]), queue_ns=max(now.queue_ns, words[4]))
