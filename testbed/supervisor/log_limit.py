"""The bound of a lab's logs: a log that has grown beyond it is cut to its newest part, and says so in its first line.

All logs are opened for appending, so that whoever writes goes on at the new end.
"""

import os
from collections.abc import Callable
from pathlib import Path

DEFAULT_BYTES = 64 << 20
VARIABLE = "PDDBED_LOG_LIMIT"  # of `pddbed up`; bytes of each log, hosts' commands included
KEPT = 4  # the newest quarter stays


def limit_bytes() -> int:
    """Limit from the environment, or the default; a value that is no number of at least 64 KiB counts as none."""
    text = os.environ.get(VARIABLE, "")
    return int(text) if text.isdecimal() and int(text) >= 64 << 10 else DEFAULT_BYTES


def cut_logs(directory: Path, most_bytes: int, told: Callable[[str], None]) -> None:
    """Cut every log in a lab's directory of logs that is longer than that. Raises OSError."""
    for file in directory.rglob("*.log"):
        if not file.is_symlink() and file.is_file() and (size := file.stat().st_size) > most_bytes:
            _cut(file, size, most_bytes)
            told(file.relative_to(directory).as_posix())


def _cut(file: Path, size: int, most_bytes: int) -> None:
    fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        newest = os.pread(fd, most_bytes // KEPT, size - most_bytes // KEPT)
        newest = newest[newest.find(b"\n") + 1 :]
        left_out = f"pddbed: {size - len(newest)} bytes are left out here: a log is at most {most_bytes} bytes long"
        os.ftruncate(fd, 0)
        os.write(fd, f"{left_out} ({VARIABLE})\n".encode() + newest)
    finally:
        os.close(fd)
