"""Both ends of the transport, as an experiment has them: started in p0 and md0, and their byte counters noted.

The counters are noted at a moment when nothing is on its way.
"""

import time
from dataclasses import asdict

from experiments.framework.lab import ExperimentLab
from experiments.framework.process import Process
from experiments.transport.memory import Shape

_NOTES, _EVERY_S = 40, 0.13


def start_pair(lab: ExperimentLab, module: str, shape: Shape, connection_bps: int | None) -> tuple[Process, Process]:
    """Start `module` as sender and as receiver, connected."""
    ends = []
    for host in ("md0", "p0"):  # one after the other: the sender's deadline to connect runs from its own start
        ends.append(lab.start_program(host, module))
        ends[-1].order(shape=asdict(shape), connection_bps=connection_bps)
        ends[-1].wait_for("ready")
    receiver, sender = ends
    return sender, receiver


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
