"""Mooncake's FAST'25 JSONL, read and written: `timestamp` in ms, `input_length`, `output_length`, `hash_ids`.

Plain or gzipped; `session` and `turn` are read where they are present (times of such a trace may count from each
session's own beginning). The block size is not in the file: it is the one size for which every request has one id per
block, unless it is given.
"""

import gzip
import json
import os
from pathlib import Path
from typing import Any

from experiments.traces.files import as_whole, check_ids, fits, ids, lines, parse_object, shown, whole
from experiments.traces.trace import Request, Trace, TraceError, in_order, out_of_order

CANDIDATES = (512, 64, 16, 1, 4, 8, 32, 128, 256, 1024)
MOST_MS = 366 * 24 * 3600 * 1000
MOST_SESSIONS = 1 << 40


def read(path: Path, block_tokens: int | None) -> Trace:
    """Raises TraceError."""
    names: dict[int, int] = {}  # one object for each id, of which a long prompt has thousands
    rows = [(number, _request(path, number, parse_object(path, number, text), names)) for number, text in lines(path)]
    if not rows:
        raise TraceError(path, None, "holds no request")
    requests = [request for _, request in rows]
    size = block_tokens or _block_tokens(path, rows[0][0], requests)
    for number, request in rows:
        check_ids(path, number, len(request.blocks), request.input_tokens, size)
    return Trace(in_order(requests), size, "mooncake", path.name, out_of_order(requests))


def _block_tokens(path: Path, first: int, requests: list[Request]) -> int:
    """The first candidate size that most requests agree with: a broken line is then named as the odd one out."""

    def agreeing(size: int) -> int:
        return sum(fits(len(one.blocks), one.input_tokens, size) for one in requests)

    best = max(CANDIDATES, key=agreeing)
    if 2 * agreeing(best) <= len(requests):
        sizes = ", ".join(map(str, sorted(CANDIDATES)))
        raise TraceError(path, first, f"no block size of {sizes} fits its hash_ids; give --block-tokens")
    return best


def _request(path: Path, number: int, row: dict[str, Any], names: dict[int, int]) -> Request:
    given = row.get("timestamp")
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0 <= given <= MOST_MS:
        raise TraceError(
            path, number, f'"timestamp" is {shown(given)}; it must be milliseconds since the beginning, at most a year'
        )
    optional = {
        key: None if row.get(key) is None else as_whole(path, number, row[key], key, 0, MOST_SESSIONS)
        for key in ("session", "turn")
    }
    return Request(
        time_ns=round(given * 1_000_000),
        input_tokens=whole(path, number, row, "input_length", 1),
        output_tokens=whole(path, number, row, "output_length", 0),
        blocks=tuple(names.setdefault(value, value) for value in ids(path, number, row)),
        **optional,
    )


def write_trace(trace: Trace, path: Path) -> None:
    """Complete or not at all. Raises TraceError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            packed = gzip.GzipFile("", "wb", fileobj=file, mtime=0) if path.suffix == ".gz" else None
            for row in map(_row, trace.requests):
                (packed or file).write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
            if packed is not None:
                packed.close()
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise TraceError(path, None, f"cannot be written: {error.strerror}") from None


def _row(request: Request) -> dict[str, object]:
    row: dict[str, object] = {"timestamp": _milliseconds(request.time_ns)}
    if request.session is not None:
        row["session"] = request.session
    if request.turn is not None:
        row["turn"] = request.turn
    row |= {"input_length": request.input_tokens, "output_length": request.output_tokens}
    return row | {"hash_ids": list(request.blocks)}


def _milliseconds(time_ns: int) -> int | float:
    whole, rest = divmod(time_ns, 1_000_000)
    return time_ns / 1e6 if rest else whole
