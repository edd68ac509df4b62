"""A lab's link counters over a run: a row per link, direction and second in links.jsonl, and what is missing there.

A sample that fails is told and the next one is taken all the same: its row then covers more than a second (`span_s`).
Whoever keeps the run asks for `reasons` when it is over.
"""

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testbed.lab.control import ask_lab
from testbed.lab.record import Record

SAMPLE_S = 1.0
MOST_S = 3.0  # between two samples; more is a gap
PATIENCE_S = 15.0  # with a lab that does not answer

Key = tuple[str, str]
Counters = dict[Key, Mapping[str, int]]


class LinkWatch:
    """Samples in a thread, from `start` to `stop`, into `out`."""

    def __init__(self, record: Record, out: Path, part: str) -> None:
        self._record = record
        self._out = out
        self._part = part
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._last: tuple[float, Counters] | None = None  # when, on the monotonic clock, and what was counted then
        self._ended_s = 0.0
        self.samples = 0
        self.gaps: list[float] = []
        """How long each stretch without a sample was, in seconds."""
        self.failures: list[str] = []
        """Why samples failed."""

    def start(self) -> None:
        self._ended_s = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def reasons(self) -> list[str]:
        """Why links.jsonl is not whole; empty when it is. Call after `stop`."""
        reasons = []
        if self.gaps:
            gaps = f"{len(self.gaps)} gap" + ("s" if len(self.gaps) > 1 else "")
            reasons.append(f"links.jsonl has {gaps}, {sum(self.gaps):.0f} s in all, in which nobody counted")
        if self.failures:
            often = "once" if len(self.failures) == 1 else f"{len(self.failures)} times, the last time"
            reasons.append(f"the links could not be sampled {often}: {self.failures[-1]}")
        return reasons

    def _run(self) -> None:
        self._sample()
        while not self._over.wait(SAMPLE_S):
            self._sample()
        if not self._note_gap(time.monotonic()):
            return
        self._sample()  # what moved in the gap

    def _sample(self) -> None:
        """One sample, or the reason why there is none: never an exception."""
        try:
            now = self._counters()
            at_s = time.monotonic()
            self._note_gap(at_s)
            self._ended_s = at_s
            if self._last is not None:
                self._write(now, at_s - self._last[0], self._last[1])
            self._last = at_s, now
            self.samples += 1
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    def _note_gap(self, at_s: float) -> bool:
        if at_s - self._ended_s <= MOST_S:
            return False
        self.gaps.append(at_s - self._ended_s)
        self._ended_s = at_s
        return True

    def _write(self, now: Counters, span_s: float, before: Counters) -> None:
        """Append rows of what moved since the sample before; a link that was not there then begins with the next."""
        rows = []
        for (link, direction), counters in now.items():
            if (counted := before.get((link, direction))) is None:
                continue
            moved = {name: value - counted.get(name, 0) for name, value in counters.items()}
            about = {"part": self._part, "time": time.time(), "span_s": round(span_s, 3)}
            rows.append(json.dumps({**about, "link": link, "direction": direction, **moved}) + "\n")
        text = "".join(rows).encode()
        with self._out.open("ab", buffering=0) as stream:
            size = stream.seek(0, 2)
            try:
                while text:
                    text = text[stream.write(text) :]
            except OSError:
                stream.truncate(size)  # rows are whole, or not there
                raise

    def _counters(self) -> Counters:
        """Raises LabError, and KeyError for a link that cannot be read."""
        reply: dict[str, Any] = ask_lab(self._record, {"op": "wan-show"}, PATIENCE_S)[0]
        return {(link["name"], way): counts for link in reply["links"] for way, counts in link["counters"].items()}
