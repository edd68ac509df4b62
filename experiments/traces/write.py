"""Writing a trace as Mooncake-style JSONL, gzipped when the name says so. The same bytes for the same trace."""

import gzip
import json
import os
from pathlib import Path

from experiments.traces.trace import Request, Trace, TraceError


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
