"""Lines that a worker leaves on disk, whole or not at all, whatever becomes of the disk.

A worker never fails for want of room: what cannot be written is counted by kind (`Unwritten`), told in the log, in
`/metrics` and, within a lab, by `pddbed status`. A line that was begun and not finished is taken back, so that every
line of a file is whole; where that is refused as well, the next one begins on a line of its own.
"""

import errno
import logging
import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

KINDS = ("requests", "bytes", "pace", "log")
ROW_WORDS = 8  # of 64 bits each, in the machine's byte order: one for each kind, errno, CLOCK_MONOTONIC of the latest
MOST_BYTES = 1 << 30  # of one file, unless PDDBED_RECORDS_LIMIT says otherwise
TELL_EVERY_S = 60.0
FULL = errno.EFBIG  # stands for a file that has reached its limit


class Unwritten:
    """Numbers of lines that found no room, by kind. In a lab these are in the lab's file, too (docs/environment.md)."""

    def __init__(self, row: memoryview | None = None) -> None:
        """`row`: where the lab reads them, `ROW_WORDS` words."""
        self.counts = dict.fromkeys(KINDS, 0)
        self.reason = ""
        self._row = row
        self._told_s: float | None = None

    @classmethod
    def in_lab(cls, path: str, row: int) -> "Unwritten":
        """Counts that the lab reads from a row of its file. Raises OSError, ValueError."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            words = memoryview(mmap.mmap(fd, 0)).cast("q")
        finally:
            os.close(fd)
        if not 0 <= row < len(words) // ROW_WORDS:
            raise ValueError(f"it has no row {row}")
        return cls(words[row * ROW_WORDS : (row + 1) * ROW_WORDS])

    def note(self, kind: str, error: OSError, lines: int = 1) -> None:
        """Count lines that were not written, and say so, but not each time."""
        self.counts[kind] += lines
        self.reason = error.strerror or str(error)
        if self._row is not None:
            self._row[KINDS.index(kind)] = self.counts[kind]
            self._row[len(KINDS)] = error.errno or 0
            self._row[len(KINDS) + 1] = time.monotonic_ns()
        now = time.monotonic()
        if kind != "log" and (self._told_s is None or now > self._told_s + TELL_EVERY_S):
            self._told_s = now
            log.warning("%d lines of %s could not be written so far: %s", self.counts[kind], kind, self.reason)


class LineFile:
    """Appends to one file, which is made, with its directory, when there is a line for it, and again when it is gone.

    `most_bytes`: when the file has so many, it ends with the line that `last_line` makes, and no more is written.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        unwritten: Unwritten,
        most_bytes: int = MOST_BYTES,
        last_line: Callable[[], bytes] | None = None,
    ) -> None:
        self._path = path
        self._kind = kind
        self._unwritten = unwritten
        self._most_bytes = most_bytes
        self._last_line = last_line
        self._fd: int | None = None
        self._torn = False

    def make(self) -> None:
        """Have the file there before its first line, where that can be."""
        with suppress(OSError):
            self._open()

    def write(self, line: bytes) -> bool:
        """Append a line (without its end); False, and counted, where that failed."""
        try:
            fd = self._open()
            size = os.fstat(fd).st_size
            if size + len(line) + 1 > self._most_bytes:
                self._end(fd, size)
            self._append(fd, size, line)
        except OSError as error:
            self._unwritten.note(self._kind, error)
            return False
        return True

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is not None:
            mine = os.fstat(self._fd)
            with suppress(FileNotFoundError):
                found = self._path.stat()
                if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
                    return self._fd
            self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(fd).st_size
        self._torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"  # whoever wrote before ended in the middle
        return fd

    def _append(self, fd: int, size: int, line: bytes) -> None:
        left = memoryview((b"\n" if self._torn else b"") + line + b"\n")
        try:
            while left:
                left = left[os.write(fd, left) :]
        except OSError:
            try:
                os.ftruncate(fd, size)
            except OSError:
                self._torn = self._torn or os.fstat(fd).st_size > size
            raise
        self._torn = False

    def _end(self, fd: int, size: int) -> None:
        """Raises OSError: the file is full, and says so in its last line."""
        if self._last_line is not None and size < self._most_bytes:
            last, self._last_line = self._last_line(), None
            self._append(fd, size, last)
        raise OSError(FULL, f"{self._path.name} has reached its limit of {self._most_bytes} bytes")


class LogLines(logging.Handler):
    """A process's log, one write a line. What finds no room is counted, and tears no other line."""

    def __init__(self, fd: int, unwritten: Unwritten) -> None:
        super().__init__()
        self._fd = fd
        self._unwritten = unwritten
        self._torn = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            left = memoryview(("\n" * self._torn + self.format(record) + "\n").encode(errors="backslashreplace"))
        except Exception:
            self.handleError(record)
            return
        begun = False
        try:
            while left:
                left = left[os.write(self._fd, left) :]
                begun = True
            self._torn = False
        except OSError as error:
            self._torn = self._torn or begun
            self._unwritten.note("log", error)


def replace_whole(path: Path, text: str, kind: str, unwritten: Unwritten) -> bool:
    """Replace a file in one step, so that a reader never sees half of it; False, and counted, where that failed."""
    whole = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.write_text(text)
        whole.replace(path)
    except OSError as error:
        unwritten.note(kind, error)
        with suppress(OSError):
            whole.unlink()
        return False
    return True
