"""The JSONL of Mooncake's FAST'25 traces: `timestamp` in ms, `input_length`, `output_length`, `hash_ids`.

Plain or gzipped; `session` and `turn` are read where they are present (times of such a trace may count from each
session's own beginning). The block size is not in the file: it is the one size for which every request has one id per
block, unless it is given.
"""

from pathlib import Path
from typing import Any

from experiments.traces.files import as_whole, fits, ids, lines, parse_object, whole
from experiments.traces.trace import Request, Trace, TraceError, in_order

CANDIDATES = (512, 64, 16, 1, 4, 8, 32, 128, 256, 1024)
MOST_MS = 366 * 24 * 3600 * 1000


def read(path: Path, block_tokens: int | None) -> Trace:
    """Raises TraceError."""
    rows = [(number, parse_object(path, number, text)) for number, text in lines(path)]
    if not rows:
        raise TraceError(path, None, "holds no request")
    lengths = [whole(path, number, row, "input_length", 1) for number, row in rows]
    size = block_tokens or _block_tokens(path, rows, lengths)
    requests = [_request(path, number, row, length, size) for (number, row), length in zip(rows, lengths, strict=True)]
    return Trace(in_order(requests), size, "mooncake", path.name)


def _block_tokens(path: Path, rows: list[tuple[int, dict[str, Any]]], lengths: list[int]) -> int:
    """The first candidate size that most requests agree with: a broken line is then named as the odd one out."""
    counts = [len(row["hash_ids"]) if isinstance(row.get("hash_ids"), list) else -1 for _, row in rows]

    def agreeing(size: int) -> int:
        return sum(fits(count, length, size) for count, length in zip(counts, lengths, strict=True))

    best = max(CANDIDATES, key=agreeing)
    if 2 * agreeing(best) <= len(rows):
        sizes = ", ".join(map(str, sorted(CANDIDATES)))
        raise TraceError(path, rows[0][0], f"no block size of {sizes} fits its hash_ids; give --block-tokens")
    return best


def _request(path: Path, number: int, row: dict[str, Any], length: int, size: int) -> Request:
    given = row.get("timestamp")
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0 <= given <= MOST_MS:
        raise TraceError(path, number, f'"timestamp" is {given!r}; it must be milliseconds since the beginning')
    optional = {
        key: None if row.get(key) is None else as_whole(path, number, row[key], key, 0) for key in ("session", "turn")
    }
    return Request(
        time_ns=round(given * 1_000_000),
        input_tokens=length,
        output_tokens=whole(path, number, row, "output_length", 0),
        blocks=ids(path, number, row, length, size),
        **optional,
    )
