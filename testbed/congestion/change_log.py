"""`congestion.jsonl` in the lab's records: everything that was applied, one JSON object a line, in order.

Owns the file. Every line has `monotonic_ns` (CLOCK_MONOTONIC, which all namespaces of a machine share) and `what`;
docs/congestion.md lists the rest. A full disk ends no timeline: lines that find no room are told as a trouble of the
lab, and so is everything that failed.
"""

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic_ns
from typing import Any

MOST_BYTES = 1 << 30  # a replay of an hour at 100 changes a second is a tenth of that


class ChangeLog:
    """Appends from any thread; a line is in the file when `write` returns. `trouble`: told what failed, and how."""

    def __init__(self, path: Path, trouble: Callable[[str, object], None]) -> None:
        self._path = path
        self._trouble = trouble
        self._fd: int | None = None
        self._closed = False
        self._lock = threading.Lock()

    def write(self, what: str, **fields: Any) -> None:
        line = json.dumps({"monotonic_ns": monotonic_ns(), "what": what, **fields}, separators=(",", ":"))
        if what == "error":
            self._trouble("a change of a timeline failed", fields.get("error", ""))
        if what == "end" and fields.get("state") == "failed":
            self._trouble("a timeline ended early", (fields.get("errors") or ["it does not say why"])[-1])
        with self._lock:
            if not self._closed:
                try:
                    self._append(line.encode() + b"\n")
                except OSError as error:
                    self._trouble("congestion.jsonl lacks a line", error.strerror or error)

    def _append(self, line: bytes) -> None:
        """One whole line or none of it. Raises OSError."""
        if self._fd is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size > MOST_BYTES:
            raise OSError(f"it has reached its limit of {MOST_BYTES} bytes")
        if os.fstat(self._fd).st_nlink == 0:
            os.close(self._fd)
            self._fd = None
            return self._append(line)
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, size)
            raise
        return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
