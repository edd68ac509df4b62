"""Drops of a netem, by what was asked. Values only; `netem` reads the counters."""

import math
from dataclasses import replace

from testbed.links import qdisc


class Drops:
    """A netem counts together what it loses on purpose and what its limit refuses. Each drop is what the settings of
    its time made it, so count before every change; and of an asked loss, what is far beyond chance is not the loss.
    """

    def __init__(self) -> None:
        self.lost = self.unasked = 0
        self._seen = qdisc.Statistics(0, 0, 0, 0, 0)
        self._settings: qdisc.Netem | None = None
        self._entered = self._dropped = self._beyond = 0  # under the present settings; `_beyond`: told as unasked

    def count(self, line: qdisc.Installed | None) -> None:
        """The drops since the last time, under the settings that `line` still has."""
        if line is None or not isinstance(line.settings, qdisc.Netem):
            self._seen = qdisc.Statistics(0, 0, 0, 0, 0)  # what comes in its place begins at nothing
            return
        before, self._seen = self._seen, line.statistics
        new = max(0, self._seen.drops - before.drops)
        settings = replace(line.settings, latency_ns=0, seed=None)  # jitter moves the one, every change the other
        if settings != self._settings:
            self._settings, self._entered, self._dropped, self._beyond = settings, 0, 0, 0
        if not settings.drops_packets:
            self.unasked += new
            return
        waiting = self._seen.queued_packets - before.queued_packets
        self._entered += max(0, self._seen.packets - before.packets + waiting) + new
        self._dropped += new
        beyond = max(self._beyond, self._dropped - _most_lost(settings, self._entered))
        self.unasked += beyond - self._beyond
        self.lost += new - (beyond - self._beyond)
        self._beyond = beyond


def _most_lost(netem: qdisc.Netem, entered: int) -> int:
    """Number of `entered` packets that chance loses once in a billion times; all where losses come in bursts."""
    if netem.gilbert_elliott is not None:
        return entered
    share = min(1.0, (netem.loss + netem.corrupt) / qdisc.PROBABILITY_ONE)
    return math.ceil(share * entered + 6 * math.sqrt(share * (1 - share) * entered)) + 6
