"""Reading a topology file's bytes as text, and saying plainly why that is not possible.

Owns the file system and the encoding; `document` owns what the text means.
"""

import os
import stat
from pathlib import Path

from testbed.topology.problems import Problem, TopologyErrors

MAX_BYTES = 256 * 1024  # PyYAML takes about 1 s for that
_UTF16_OR_32 = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")


def read_text(path: str | Path) -> str:
    """The text of a file of UTF-8 (with or without a byte order mark). Raises TopologyErrors."""
    file = str(path)
    try:
        content = _read(path)
    except OSError as error:
        raise _unreadable(file, _why(error, Path(path))) from None
    except ValueError:  # a NUL in the name
        raise _unreadable(file, "no file can have such a name") from None
    if len(content) > MAX_BYTES:
        raise _unreadable(file, f"is larger than {MAX_BYTES // 1024} KiB; that is no topology file")
    if content.startswith(_UTF16_OR_32):
        raise _unreadable(file, "is UTF-16 or UTF-32; save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8-sig", errors="replace").splitlines(keepends=True) or [""]
        ended = before[-1].endswith(("\n", "\r"))
        line, column = (len(before) + 1, 1) if ended else (len(before), len(before[-1]) + 1)
        message = f"the byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise TopologyErrors([Problem(file, line, column, "", message)]) from None


def _read(path: str | Path) -> bytes:
    # A pipe is fine (`pddbed validate <(generate)`); an endless device is cut off by the limit.
    with open(path, "rb") as stream:
        if stat.S_ISDIR(os.fstat(stream.fileno()).st_mode):
            raise IsADirectoryError(path)
        return stream.read(MAX_BYTES + 1)


def _why(error: OSError, path: Path) -> str:
    if isinstance(error, IsADirectoryError):
        inside = sorted(entry.name for entry in path.glob("*.y*ml"))[:3]
        hint = f"name a file in it, such as {path / inside[0]}" if inside else "name a topology file"
        return f"is a directory; {hint}"
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, PermissionError):
        return "may not be read; check its permissions"
    return f"cannot be read: {error.strerror}"


def _unreadable(file: str, message: str) -> TopologyErrors:
    return TopologyErrors([Problem(file, None, None, "", message)])
