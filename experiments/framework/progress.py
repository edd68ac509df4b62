"""Progress of a run and its time left, on stderr: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from experiments.framework.base import Part
from testbed.cli.output import echo

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

LINE_EVERY_S = 15.0


class BarOrLines:
    """A context manager on stderr: a bar of rich's columns where that is a terminal, else lines, unless `quiet`."""

    def __init__(self, columns: "Sequence[ProgressColumn]", quiet: bool, total: float | None, **fields: Any) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._quiet = quiet
        self._said = time.monotonic()
        console = Console(stderr=True)
        self._bar: Any = None
        if console.is_terminal and not quiet:
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("starting", total=total, **fields)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, text: str, *, brief: bool = False) -> None:
        """Something without a measure of its own goes on; `brief`: no line is worth it."""
        if self._bar is not None:
            self._bar.update(self._task, description=text.replace("[", r"\["))
        elif not brief:
            self._line(f"{text} ...")

    def _line_is_due(self) -> bool:
        return time.monotonic() - self._said > LINE_EVERY_S

    def _line(self, text: str) -> None:
        self._said = time.monotonic()
        if not self._quiet:
            with suppress(OSError):
                echo(text, err=True)


class RunProgress(BarOrLines):
    """Parts count by their expected seconds; what has been slower stretches what is left."""

    def __init__(self, parts: Sequence[Part], quiet: bool = False) -> None:
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

        self._total_s = sum(part.expected_s for part in parts) or 1.0
        self._done_s = 0.0
        self._part: Part | None = None
        self._began = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        super().__init__(columns, quiet, self._total_s)

    def begin(self, part: Part) -> None:
        if self._part is None:
            self._began = time.monotonic()  # what came before says nothing of the parts' pace
        self._part = part
        self.step(part.name)

    def advance(self, share: float) -> None:
        """The current part is so far, from 0 to 1."""
        assert self._part is not None
        done_s = self._done_s + share * self._part.expected_s
        if self._bar is not None:
            self._bar.update(self._task, completed=done_s)
        elif self._line_is_due():
            self._line(f"{self._part.name}: {done_s / self._total_s:.0%}, about {self._left_s(done_s):.0f} s left")

    def end(self) -> None:
        assert self._part is not None
        self.advance(1.0)
        self._done_s += self._part.expected_s

    def _left_s(self, done_s: float) -> float:
        taken_s = time.monotonic() - self._began
        pace = max(1.0, taken_s / done_s) if done_s > 5 else 1.0
        return (self._total_s - done_s) * pace
