"""A worker's byte counters on disk: one JSON line each time it is asked (SIGUSR1) and when it ends.

The counters are cumulative; whoever compares two lines knows what crossed between them.
"""

import json
import os
import time
from pathlib import Path

from workers.wire.counters import Counters


class ByteLog:
    """Appends to `bytes-HOST.jsonl` in a records directory (None: nowhere)."""

    def __init__(self, directory: Path | None, host: str, counters: Counters) -> None:
        self._file = None if directory is None else directory / f"bytes-{host}.jsonl"
        self._host = host
        self._counters = counters

    def write(self) -> None:
        """One line with everything counted so far, in one write. `time_ns` is Unix time, as packet captures have it."""
        if self._file is None:
            return
        line = {
            "host": self._host,
            "pid": os.getpid(),
            "time_ns": time.time_ns(),
            "monotonic_ns": time.monotonic_ns(),
            "counts": self._counters.rows(),
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab", buffering=0) as stream:
            stream.write(json.dumps(line).encode() + b"\n")
