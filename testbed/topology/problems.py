"""Mistakes in a topology file: one `Problem` each, all of them in one `TopologyErrors`.

Owns the form of an error (file:line:column, path, sentence, the line itself); finds no errors.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from testbed.model.units import quote

Path = tuple[str | int, ...]
MOST_SHOWN = 100  # mistakes of one file, to people
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def dotted(path: Path) -> str:
    """A path as people write it: `wan[0].delay`, `datacenters.main.hosts["edge-1.rack:2"].role`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _PLAIN_KEY.fullmatch(step):
            text += f".{step}" if text else step
        else:
            text += f"[{quote(step)}]"
    return text


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake. `line` and `column` count from 1; None when the file could not be read at all."""

    file: str
    line: int | None
    column: int | None
    path: str  # `wan[0].delay`; empty for the file as a whole
    message: str  # one sentence: the value, what is wrong, what would be accepted
    source: str = ""  # the line itself, for an excerpt
    width: int = 1  # characters of `source` that the problem is about

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}:{self.column}"
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"

    def excerpt(self, most: int = 100) -> str:
        """The line with carets under what is wrong, on two lines; empty where there is nothing to show."""
        if self.line is None or self.column is None or not self.source.strip():
            return ""
        start = max(0, self.column - 1 - most // 2) if len(self.source) > most else 0
        shown = self.source[start : start + most]
        shown = "".join(c if c.isprintable() else " " for c in shown)
        number = f"{self.line:>6} | "
        before = self.column - 1 - start
        carets = "^" * max(1, min(self.width, most - before))
        return f"{number}{shown.rstrip()}\n{' ' * (len(number) - 2)}| {' ' * before}{carets}"

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


class TopologyErrors(Exception):
    """A topology file cannot be used. `problems` has every mistake, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(set(problems), key=lambda p: (p.line or 0, p.column or 0, p.path, p.message)))
        more = len(self.problems) - MOST_SHOWN
        lines = [*map(str, self.problems[:MOST_SHOWN]), *([f"... and {more:,} mistakes more"] if more > 0 else [])]
        super().__init__("\n".join(lines))
