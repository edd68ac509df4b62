"""Reading a trace file: bounded, line by line, every mistake with its line, never more than needed in memory.

Owns the file system and the limits; the formats are `mahimahi`'s and `csv_trace`'s.
"""

import hashlib
import os
import stat
from array import array
from collections.abc import Iterator
from pathlib import Path

from testbed.model.trace import Trace
from testbed.model.units import format_rate, printable
from testbed.topology.problems import Problem
from testbed.topology.traces.csv_trace import Rows
from testbed.topology.traces.mahimahi import OPPORTUNITY_BITS, Opportunities

MAX_BYTES = 64 * 2**20  # ten minutes of packets at 200 Mbit/s in Mahimahi's format
MAX_LINE = 200
MAX_PROBLEMS = 20
DEFAULT_GRANULARITY_NS = 20_000_000
_PACKED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7zXZ": "xz", b"(\xb5/\xfd": "zstd", b"PK": "zip"}


class TraceErrors(Exception):
    """A trace cannot be played. `problems` point into its file; a problem without a line is about all of it."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, problems)))


class _Given:
    """Lines of a file with their numbers; stops reading at the limits, and at what is no text."""

    def __init__(self, path: Path) -> None:
        self.digest = hashlib.sha256()
        self.number = 0
        self._path = path

    def lines(self) -> Iterator[bytes]:
        """Raises OSError, and ValueError for a file that is no text (about the line that `number` says)."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("is no regular file")
            read = 0
            while line := stream.readline(MAX_LINE + 1):
                self.number += 1
                read += len(line)
                self.digest.update(line)
                if self.number == 1:
                    line = self._beginning(line)
                if read > MAX_BYTES:
                    raise ValueError(f"is larger than {MAX_BYTES // 2**20} MiB; use a shorter trace")
                text = line.rstrip(b"\r\n")
                if any(byte < 9 or 13 < byte < 32 or byte > 126 for byte in text):
                    raise ValueError("is no plain text; a trace is a text file of numbers")
                if len(text) > MAX_LINE:
                    raise ValueError(f"has more than {MAX_LINE} characters; that is no line of a trace")
                yield text

    def _beginning(self, line: bytes) -> bytes:
        for magic, name in _PACKED.items():
            if line.startswith(magic):
                raise ValueError(f"is packed with {name}; unpack it first")
        return line.removeprefix(b"\xef\xbb\xbf")


def read_trace(path: Path, kind: str, granularity_ns: int | None, max_rate_bps: int) -> Trace:
    """The trace in a file. `kind` is mahimahi, csv or auto (csv by the name's ending). Raises TraceErrors.

    A trace of a single row has a period of 0 in its file; it gets one second here, and plays as a constant.
    """
    if kind == "auto":
        kind = "csv" if path.suffix.lower() == ".csv" else "mahimahi"
    given = _Given(path)
    problems: list[Problem] = []
    reader: Rows | Opportunities = Rows() if kind == "csv" else Opportunities(granularity_ns or DEFAULT_GRANULARITY_NS)
    try:
        for line in given.lines():
            try:
                if isinstance(reader, Rows):
                    reader.add(line.decode("ascii"))
                else:
                    reader.add(line)
            except ValueError as error:
                problems.append(_problem(path, given.number, str(error), line))
                if len(problems) == MAX_PROBLEMS or given.number == 1:
                    break  # behind a wrong header, or in a file of another kind, every line is wrong
    except OSError as error:
        raise TraceErrors([_problem(path, None, f"cannot be read: {error.strerror}")]) from None
    except ValueError as error:
        problems.append(_problem(path, given.number or None, str(error)))
    if problems:
        raise TraceErrors(problems)
    try:
        trace = _finish(path, reader, given.digest.hexdigest(), granularity_ns)
    except ValueError as error:
        raise TraceErrors([_problem(path, max(1, given.number), str(error))]) from None
    too_fast = _too_fast(trace, max_rate_bps)
    if too_fast is not None:
        raise TraceErrors([_problem(path, reader.fastest_line, too_fast)])
    return trace


def _finish(path: Path, reader: Rows | Opportunities, sha256: str, granularity_ns: int | None) -> Trace:
    if isinstance(reader, Rows):
        starts, columns, period_ns = reader.finish()
        return Trace(str(path), "csv", sha256, period_ns or 1_000_000_000, starts, columns)
    starts, rates = reader.rates()
    granularity_ns = granularity_ns or DEFAULT_GRANULARITY_NS
    columns = {"rate_bps": rates}
    return Trace(str(path), "mahimahi", sha256, reader.period_ns, starts, columns, granularity_ns)


def _too_fast(trace: Trace, max_rate_bps: int) -> str | None:
    rates: array[int] = trace.columns.get("rate_bps", array("q"))
    fastest = max(rates, default=0)
    if fastest <= max_rate_bps:
        return None
    at_s = trace.starts_ns[rates.index(fastest)] / 1e9
    packets = ""
    if trace.granularity_ns:
        count = fastest * trace.granularity_ns // (OPPORTUNITY_BITS * 10**9)
        packets = f" ({count:,} packets within {trace.granularity_ns / 1e6:g} ms)"
    return (
        f"asks for {format_rate(fastest)}{packets} at {at_s:g} s, more than the {format_rate(max_rate_bps)} "
        "that the link's driver can hold"
    )


def _problem(path: Path, line: int | None, message: str, source: bytes = b"") -> Problem:
    text = printable(source.decode("ascii", errors="replace"))
    return Problem(str(path), line, None if line is None else 1, "", printable(message), text, max(1, len(text)))
