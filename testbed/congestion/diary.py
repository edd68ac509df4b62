"""`congestion.jsonl` in the lab's records: everything that was applied, one JSON object a line, in order.

Owns the file. Every line has `monotonic_ns` (CLOCK_MONOTONIC, which all namespaces of a machine share) and `what`;
docs/congestion.md lists the rest.
"""

import json
import threading
from pathlib import Path
from time import monotonic_ns
from typing import Any


class Diary:
    """Appends from any thread; a line is in the file when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()

    def write(self, what: str, **fields: Any) -> None:
        line = json.dumps({"monotonic_ns": monotonic_ns(), "what": what, **fields}, separators=(",", ":"))
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")

    def close(self) -> None:
        with self._lock:
            self._file.close()
