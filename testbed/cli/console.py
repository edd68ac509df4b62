"""The rich console of every command: its tables keep words whole, and its text cannot drive the terminal."""

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table

from testbed.cli.output import harmless

UNLIMITED = 10_000  # cells: nothing is wrapped where a program reads, or a file is written


class Console(rich.console.Console):
    """Rich's console without wrapping where there is no terminal, and with tables as wide as their longest words
    (addresses, names, paths), so that these can be copied; control characters are escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, **options})

    def print(self, *objects: Any, **options: Any) -> None:
        tables = [item for item in objects if isinstance(item, Table)]
        if tables:
            least, width = max(map(self._keep_words, tables)), self.width
            self.width = max(width, least) if self.is_terminal else UNLIMITED  # rich's own `width` only narrows
            try:
                super().print(*objects, **{"crop": False, **options})
            finally:
                self.width = width
        else:  # a terminal breaks lines without breaking what is copied
            super().print(*objects, **{"soft_wrap": True, **options})

    def _keep_words(self, table: Table) -> int:
        """Let no column be narrower than its longest word; returns how wide the table then is at least."""
        wide = self.options.update(width=UNLIMITED)
        for column in table.columns:
            measured = [Measurement.get(self, wide, cell) for cell in (column.header, *column.cells)]
            column.min_width = max(one.minimum for one in measured)
            column.no_wrap = all(one.minimum == one.maximum for one in measured)  # others give way first
        return Measurement.get(self, wide, table).minimum

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)
