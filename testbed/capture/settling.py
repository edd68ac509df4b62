"""Reading the workers' counters at one end of a capture: again and again until nothing is on its way, within limits."""

import time

from testbed.capture.context import Context
from testbed.capture.counters import SLACK_NS
from testbed.lab.control import ask_lab
from testbed.lab.record import LabError, Record


def lags_s(context: Context) -> tuple[float, float]:
    """How long a reading must keep from the capture's begin and end where something is always on its way.

    What a worker has just received left before; what it has just sent has yet to pass the point of capture.
    """
    passages = context.passages or ()
    before_ns = max((passage.before_ns for passage in passages), default=0)
    after_ns = max((passage.after_ns for passage in passages), default=0)
    return (after_ns + 2 * SLACK_NS) / 1e9, before_ns / 1e9


class Settling:
    """Call `step` until it says that this end is done."""

    def __init__(self, record: Record, patience_s: float, *, before_s: float = 0.0, after_s: float = 0.0) -> None:
        """`before_s`: the last reading is not taken earlier; `after_s`: nothing more is done for so long after it."""
        self._record = record
        self._not_before = time.monotonic() + before_s
        self._after_s = after_s
        self._last_reading = time.monotonic() + max(patience_s, before_s)
        self._done_at: float | None = None
        self.noted: set[str] | None = None  # the workers that noted their counters each time; None: not asked yet

    def step(self) -> bool:
        """Read the counters, unless that is over; True when a quiet moment was found or the limits are reached."""
        if self._done_at is None:
            self._done_at = self._read()
        return self._done_at is not None and time.monotonic() >= self._done_at

    def _read(self) -> float | None:
        """When to be done, if this was the last reading."""
        now = time.monotonic()
        try:
            reply, _ = ask_lab(self._record, {"op": "count-bytes"})
        except LabError:  # it is going away; the recorder will notice
            return now
        noted = set(reply["counted"])
        self.noted = noted if self.noted is None else self.noted & noted
        if reply["level"] and now >= self._not_before:
            return now
        return None if now < self._last_reading else time.monotonic() + self._after_s
