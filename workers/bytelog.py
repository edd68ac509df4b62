"""A worker's byte counters on disk: one JSON line each time it is asked (SIGUSR1) and when it ends.

The counters are cumulative; whoever compares two lines knows what crossed between them.
"""

import json
import os
import time
from pathlib import Path

from workers.linefile import LineFile, Unwritten
from workers.wire.frames import Counters


class ByteLog:
    """Appends to `bytes-HOST.jsonl` in a records directory (None: nowhere)."""

    def __init__(self, directory: Path | None, host: str, counters: Counters, unwritten: Unwritten) -> None:
        self._file = None if directory is None else LineFile(directory / f"bytes-{host}.jsonl", "bytes", unwritten)
        self._host = host
        self._counters = counters

    def write(self) -> None:
        """Append everything counted so far; never fails. `time_ns` is Unix time, as packet captures have it."""
        if self._file is None:
            return
        line = {
            "host": self._host,
            "pid": os.getpid(),
            "time_ns": time.time_ns(),
            "monotonic_ns": time.monotonic_ns(),
            "counts": self._counters.rows(),
        }
        self._file.write(json.dumps(line).encode())
