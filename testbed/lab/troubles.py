"""Troubles of a lab that did not end it, told by `status` and by every verification: lines that workers could not
write, background work that failed and went on, logs that were cut.

Owns the file in which workers count what they could not write (`workers.linefile`), mapped before a disk can be full.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from testbed.lab.messages import Trouble

ROW_WORDS = 8  # of 64 bits each: one for each kind, errno, CLOCK_MONOTONIC of the latest; docs/environment.md
KINDS = ("requests", "bytes", "pace", "log")
WORDS = {"requests": "request records", "bytes": "byte counts", "pace": "pace counts", "log": "lines of its log"}
FULL_FILE = 27  # EFBIG: stands for a file that has reached its limit
KINDS_OF_FIGURES = ("requests", "bytes", "pace")  # a run that lacks these is not whole


class Troubles:
    """Everything that was told, each kind once, with how often. Methods may be called from any thread."""

    def __init__(self, unwritten: Path, hosts: Iterable[str]) -> None:
        """Raises OSError when there is no room for the file."""
        self._hosts = list(hosts)
        size = 8 * ROW_WORDS * max(1, len(self._hosts))
        fd = os.open(unwritten, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(fd, 0, size)
            self._words = memoryview(mmap.mmap(fd, size)).cast("q")
        finally:
            os.close(fd)
        self._noted: dict[str, Trouble] = {}
        self._forgiven: dict[str, int] = {}
        self._lock = threading.Lock()

    def note(self, what: str, error: object, *, claim: bool = True) -> None:
        """Something failed, or was left out, and the lab goes on. `claim`: figures may have suffered."""
        said = str(error) or repr(error)
        with self._lock:
            now = time.time()
            first: Trouble = {"what": what, "times": 0, "first": now, "claim": claim, "last": now, "error": said}
            row = self._noted.setdefault(what, first)
            row.update({"times": row["times"] + 1, "last": now, "error": said})

    def guard(self, what: str, work: Callable[[], object]) -> bool:
        """Do something that must not end whoever does it over and over; a failure is noted. Whether it went well."""
        try:
            work()
        except Exception as error:
            self.note(f"{what} failed", f"{type(error).__name__}: {error}")
            return False
        return True

    def unwritten(self) -> dict[str, dict[str, Any]]:
        """By host, of those that could not write something: lines by kind, and the latest reason."""
        found = {}
        for row, host in enumerate(self._hosts):
            words = self._words[row * ROW_WORDS : (row + 1) * ROW_WORDS].tolist()
            counts = {kind: lines for kind, lines in zip(KINDS, words, strict=False) if lines}
            if counts:
                error = words[len(KINDS)]
                reason = "a file has reached its limit" if error == FULL_FILE else os.strerror(error)
                found[host] = {**counts, "reason": reason}
        return found

    def rows(self) -> list[Trouble]:
        """For `status`: what, how often, the latest error, and whether figures may have suffered."""
        with self._lock:
            noted = [row.copy() for row in self._noted.values()]
        for host, counts in self.unwritten().items():
            for kind in KINDS:
                if kind in counts:
                    claim = kind in KINDS_OF_FIGURES
                    what = f"{host} could not write {WORDS[kind]}"
                    noted.append({"what": what, "times": counts[kind], "error": counts["reason"], "claim": claim})
        return noted

    def forget(self) -> None:
        """Make what was told so far no reason any more; `status` still tells it."""
        self._forgiven = {row["what"]: row["times"] for row in self.rows()}

    def reasons(self) -> list[str]:
        """Reasons why figures of this lab, since `forget`, may not be whole."""
        new = [row for row in self.rows() if row["claim"] and row["times"] > self._forgiven.get(row["what"], 0)]
        return [trouble_words(row) for row in new]


def trouble_words(row: Trouble) -> str:
    """For people: `gw0 could not write request records (31 times; the latest: No space left on device)`."""
    often = "once" if row["times"] == 1 else f"{row['times']:,} times; the latest"
    return f"{row['what']} ({often}: {row['error']})"
