"""Progress of a run on stderr: a bar with running, finished and failed on a terminal, a line now and then elsewhere."""

import time

from experiments.bench.outcome import Outcome
from experiments.framework.progress import BarOrLines

REDRAW_S = 0.1


class BenchProgress(BarOrLines):
    """Told of each request."""

    def __init__(self, quiet: bool = False) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

        self._count = 0
        self._last_due_s = 0.0
        self._running = self._done = self._failed = 0
        self._began = self._drawn = time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[more]}"),
        )
        super().__init__(columns, quiet, None, more="")

    def step(self, text: str, *, brief: bool = False) -> None:
        if self._bar is not None:
            self._bar.update(self._task, more="")
        super().step(text, brief=brief)

    def expect(self, count: int, last_due_s: float) -> None:
        """Take the number of requests, and the time when the last one is due (0 where none is)."""
        self._count, self._last_due_s = count, last_due_s

    def begin(self) -> None:
        """The load begins now."""
        self._began = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, description="requests", total=self._count)

    def started(self) -> None:
        self._running += 1
        self._show()

    def finished(self, outcome: Outcome) -> None:
        self._running -= 1
        self._done += 1
        self._failed += not outcome.success
        self._show()

    def words(self) -> str:
        failed = f", {self._failed} failed" if self._failed else ""
        left = self._left_s()
        return f"{self._running} running{failed}" + ("" if left is None else f", about {_clock(left)} left")

    def _left_s(self) -> float | None:
        """As long as what is done took, and not before the last request is due; nothing to say at first."""
        taken_s = time.monotonic() - self._began
        due_s = self._last_due_s - taken_s
        if not self._done:
            return due_s if due_s > 0 else None
        pace_s = taken_s / self._done * (self._count - self._done)
        return max(due_s, pace_s if not self._last_due_s or due_s <= 0 else 0.0, 0.0)

    def _show(self) -> None:
        now = time.monotonic()
        if self._bar is not None:
            if now - self._drawn > REDRAW_S:
                self._drawn = now
                self._bar.update(self._task, completed=self._done, more=self.words())
        elif self._line_is_due():
            self._line(f"{self._done} of {self._count} requests done, {self.words()}")


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 90 else f"{whole // 60} min {whole % 60} s"
