"""Azure's public LLM inference traces: CSV of `TIMESTAMP,ContextTokens,GeneratedTokens`, one request a line.

They say nothing about content, so no two prompts share a block here: every hit rate is 0 by construction.
"""

import csv
import re
from datetime import UTC, datetime
from pathlib import Path

from experiments.traces.files import MOST_TOKENS, lines, shown
from experiments.traces.trace import Request, Trace, TraceError, blocks_of, in_order, out_of_order

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOST_NS = 366 * 24 * 3600 * 10**9
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?")


def read(path: Path, block_tokens: int | None) -> Trace:
    """Raises TraceError."""
    size = block_tokens or 16
    rows = lines(path)
    number, header = next(rows, (1, ""))
    names = _cells(path, number, header)
    if not set(COLUMNS) <= set(names):
        raise TraceError(
            path, number, f"the first line must name the columns {', '.join(COLUMNS)}; it is {header!r:.60}"
        )
    places = [names.index(column) for column in COLUMNS]
    requests: list[Request] = []
    first_ns: int | None = None
    next_id = 1
    for number, text in rows:
        cells = _cells(path, number, text)
        if len(cells) != len(names):
            raise TraceError(path, number, f"{len(cells)} columns instead of {len(names)}; the line may be cut short")
        stamp, context, generated = (cells[place].strip() for place in places)
        time_ns = _time_ns(path, number, stamp)
        first_ns = time_ns if first_ns is None else first_ns
        if abs(time_ns - first_ns) > MOST_NS:
            raise TraceError(path, number, f"TIMESTAMP is {stamp!r:.40}, more than a year from the first request's")
        prompt = _count(path, number, "ContextTokens", context, 1)
        blocks = range(next_id, next_id + blocks_of(prompt, size))
        next_id = blocks.stop
        requests.append(Request(time_ns, prompt, _count(path, number, "GeneratedTokens", generated, 0), blocks))
    if not requests:
        raise TraceError(path, None, "holds no request")
    begin_ns = min(request.time_ns for request in requests)
    moved = (Request(r.time_ns - begin_ns, r.input_tokens, r.output_tokens, r.blocks) for r in requests)
    return Trace(in_order(moved), size, "azure", path.name, out_of_order(requests))


def _cells(path: Path, number: int, text: str) -> list[str]:
    try:
        return next(csv.reader([text]), [])
    except csv.Error as error:
        raise TraceError(path, number, f"not CSV ({error}); the line may be damaged") from None


def _time_ns(path: Path, number: int, text: str) -> int:
    match = _STAMP.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        day, clock, fraction = match.groups()
        seconds = datetime.fromisoformat(f"{day} {clock}").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise TraceError(path, number, f"TIMESTAMP is {shown(text)}; write 2023-11-16 18:15:46.680590") from None
    return int(seconds) * 1_000_000_000 + int((fraction or "").ljust(9, "0"))


def _count(path: Path, number: int, column: str, text: str, minimum: int) -> int:
    if not text.isdecimal() or len(text) > 20 or not minimum <= int(text) <= MOST_TOKENS:
        reason = f"{column} is {shown(text)}; it must be a whole number from {minimum} to {MOST_TOKENS}"
        raise TraceError(path, number, reason)
    return int(text)
