"""Traces as CSV: `time,rate,delay,loss`, each row holding until the next. Owns the format; `read` owns the file.

Units are written as in a topology file, in the cells (`0.5s,12mbit,20ms,0.1%`) or once in the header
(`time:s,rate:mbit,delay:ms,loss:%`, the cells being bare numbers). Columns may come in any order; all but the time,
and one of the others, may be left out. An empty cell keeps the value above it. Times count from the first row; the
last row holds as long as the one before it.
"""

from array import array
from collections.abc import Callable
from typing import Any

from testbed.model.trace import COLUMNS, LEAST_RATE_BPS, MAX_CHANGES
from testbed.model.units import format_duration, parse_duration, parse_percent, parse_rate, quote
from testbed.topology.fields import MAX_DELAY_NS

LEAST_GAP_NS = 5_000_000  # between two changes: a tenth of what a player can still time within 5 %
_NAMES = {"time": "time", "rate": "rate_bps", "delay": "delay_ns", "loss": "loss"}
_PARSERS: dict[str, Callable[[str], Any]] = {
    "time": parse_duration,
    "rate": parse_rate,
    "delay": parse_duration,
    "loss": parse_percent,
}


class Rows:
    """Collects the rows of a trace. `add` raises ValueError with what is wrong with a line."""

    def __init__(self) -> None:
        self._header: list[tuple[str, str]] | None = None  # (column, unit)
        self._first_ns = 0
        self._starts = array("q")
        self._columns: dict[str, array[Any]] = {}
        self._lines = 0
        self._fastest_bps = 0
        self.fastest_line = 1  # where the largest rate stands

    def add(self, line: str) -> None:
        """One line without its end. Raises ValueError."""
        self._lines += 1
        cells = [cell.strip() for cell in line.split(",")]
        if self._header is None:
            self._header = _header(cells)
            self._columns = {_NAMES[name]: array(COLUMNS[_NAMES[name]]) for name, _ in self._header if name != "time"}
            if cells[0].partition(":")[0].strip().lower() in _NAMES:
                return
        if not line.strip():
            raise ValueError("an empty line; every row is " + ",".join(name for name, _ in self._header))
        if len(cells) != len(self._header):
            names = ",".join(name for name, _ in self._header)
            raise ValueError(f"has {len(cells)} cells, not {len(self._header)} ({names})")
        if len(self._starts) >= MAX_CHANGES:
            raise ValueError(f"is one row more than the {MAX_CHANGES:,} that a replay holds; use a shorter trace")
        self._row({name: self._read(name, unit, cell) for (name, unit), cell in zip(self._header, cells, strict=True)})

    def _read(self, name: str, unit: str, cell: str) -> Any:
        if not cell:
            if name == "time":
                raise ValueError("time: is empty")
            if not self._starts:
                raise ValueError(f"{name}: is empty in the first row; there is no value above it to keep")
            return self._columns[_NAMES[name]][-1]
        try:
            value = _PARSERS[name](cell + unit)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if name == "delay" and value > MAX_DELAY_NS:
            raise ValueError(f"delay: {quote(cell + unit)} is too large; the most is {format_duration(MAX_DELAY_NS)}")
        return max(LEAST_RATE_BPS, value) if name == "rate" else value

    def _row(self, row: dict[str, Any]) -> None:
        if not self._starts:
            self._first_ns = row["time"]
        start = row["time"] - self._first_ns
        if self._starts and start <= self._starts[-1]:
            before = format_duration(self._starts[-1] + self._first_ns)
            raise ValueError(f"time: {format_duration(row['time'])} does not come after {before}; times ascend")
        if self._starts and start - self._starts[-1] < LEAST_GAP_NS:
            gap, least = format_duration(start - self._starts[-1]), format_duration(LEAST_GAP_NS)
            raise ValueError(f"time: is {gap} after the row above; changes are played at most every {least}")
        if row.get("rate", 0) > self._fastest_bps:
            self._fastest_bps, self.fastest_line = row["rate"], self._lines
        self._starts.append(start)
        for name, value in row.items():
            if name != "time":
                self._columns[_NAMES[name]].append(value)

    def finish(self) -> tuple["array[int]", dict[str, "array[Any]"], int]:
        """(starts, columns, period); a single row has the period 0. Raises ValueError."""
        if not self._starts:
            raise ValueError("is empty; a trace has rows such as 0s,10mbit,20ms,0%")
        last = self._starts[-1]
        return self._starts, self._columns, last + (last - self._starts[-2] if len(self._starts) > 1 else 0)


def _header(cells: list[str]) -> list[tuple[str, str]]:
    """The columns that a first line names; a first line of values stands for time,rate,delay,loss."""
    if cells[0] and (cells[0][0].isdigit() or cells[0][0] in "+-."):
        if not 2 <= len(cells) <= 4:
            raise ValueError(f"has {len(cells)} cells; rows are time,rate,delay,loss, and the first line may name them")
        return [(name, "") for name in list(_NAMES)[: len(cells)]]
    columns = [(name.strip().lower(), unit.strip()) for name, _, unit in (cell.partition(":") for cell in cells)]
    names = [name for name, _ in columns]
    for name in names:
        if name not in _NAMES:
            raise ValueError(f"{quote(name)} is no column; known are {', '.join(_NAMES)} (a unit follows a colon)")
        if names.count(name) > 1:
            raise ValueError(f"{quote(name)} is named twice")
    if "time" not in names or len(names) < 2:
        raise ValueError("names no column besides time" if "time" in names else "names no column time")
    return columns
