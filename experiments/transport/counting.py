"""Having both endpoints note their byte counters at a moment when nothing is on its way."""

import time

from experiments.framework.lab import Process

_NOTES, _EVERY_S = 40, 0.13


def note_quietly(sender: Process, receiver: Process) -> None:
    """Both write their counters down, at nearly the same moment, until nothing was on its way: pings cross.

    After some seconds without such a moment the last notes stand; an audit sees how much was under way then.
    """
    ends = (sender, receiver)
    for attempt in range(_NOTES):
        if attempt:
            time.sleep(_EVERY_S)
        for process in ends:
            process.order(op="note")
        sent, received = (_totals(process.wait_for("noted")["counts"]) for process in ends)
        if sent["sent"] == received["received"] and sent["received"] == received["sent"]:
            return


def _totals(counts: list[tuple[str, str, str, int, int]]) -> dict[str, int]:
    """Bytes of all classes, sent and received."""
    totals = {"sent": 0, "received": 0}
    for _, direction, _, size, _ in counts:
        totals[direction] += size
    return totals
