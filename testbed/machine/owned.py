"""Directories that pddbed made, and the one way to remove a whole directory.

A directory that we make below a place that the user chose carries a mark: a file that says what the directory is and
what it is called. Whatever lacks the mark is somebody's own, however its name looks, and is left alone. Owns the place
of caches too, a directory of our own below the one that the user names.
"""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = ".made-by-pddbed"
_MOST_BYTES = 1000


def cache_directory(name: str) -> Path:
    """The place of the cache `name`, which need not be there yet: `pddbed/NAME` below $PDDBED_CACHE, below /var/cache
    for root, below the user's own cache directory for others."""
    own = Path("/var/cache") if os.geteuid() == 0 else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("PDDBED_CACHE") or own).absolute() / "pddbed" / name


def make_cache(directory: Path) -> None:
    """Make a cache's directory unless it is there. Raises OSError, also where it is somebody else's or open to all."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o755, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH:
        raise PermissionError(errno.EPERM, "it belongs to another user, or others can write to it", str(directory))


def mark(directory: Path, kind: str, name: str | None = None) -> None:
    """Mark a directory that has just been made. `name`: what it will be called, where it is still `.NAME.something`."""
    fd = os.open(directory / MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    with os.fdopen(fd, "w") as file:
        file.write(f"{kind}\n{name or directory.name}\n")


def make_aside(parent: Path, name: str, kind: str) -> Path:
    """A new marked directory `.NAME.something` in `parent`, to be filled and then renamed to NAME."""
    directory = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
    mark(directory, kind, name)
    return directory


def is_ours(directory: Path, kind: str) -> bool:
    """True when `directory` (no link to one) is this user's and carries the mark of `kind` and of its own name."""
    try:
        found = directory.lstat()
        fd = os.open(directory / MARK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISDIR(found.st_mode) or not stat.S_ISREG(status.st_mode):
            return False
        if {found.st_uid, status.st_uid} != {os.geteuid()}:
            return False
        said, _, name = file.read(_MOST_BYTES).decode(errors="replace").removesuffix("\n").partition("\n")
    return said == kind and (directory.name == name or directory.name.startswith(f".{name}."))


def ours(parent: Path, kind: str) -> Iterator[Path]:
    """The directories of `kind` that we made in `parent`, in the order of names; nothing where one cannot look."""
    with suppress(OSError):
        yield from [path for path in sorted(parent.iterdir()) if is_ours(path, kind)]


def remove(directory: Path, kind: str) -> bool:
    """Remove a directory that we made, with all that is in it; False, and nothing is touched, where it is not ours."""
    if not is_ours(directory, kind):
        return False
    # The mark goes last: what a removal that was cut short leaves is still known as ours.
    for path in directory.iterdir():
        if path.name == MARK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    (directory / MARK).unlink(missing_ok=True)
    with suppress(OSError):  # somebody put something into it meanwhile
        directory.rmdir()
    return True


def sweep(parent: Path, kind: str, kept: Path | None = None) -> None:
    """Remove the directories of `kind` that we made in `parent`, but `kept` and those on which a process has a lock."""
    for directory in ours(parent, kind):
        if directory == kept:
            continue
        with suppress(OSError):  # a lock: it is in use
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(directory, kind)
            finally:
                os.close(lock)
