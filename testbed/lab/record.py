"""A lab's record: the directory under /run that says a lab exists, and whether it is alive.

Owns names, paths, locking and sweeping. A lab is alive exactly while its guardian holds the POSIX lock on
`guardian.lock`; the kernel drops that lock however the guardian dies, so no pid file can lie. A record carries our mark
(`testbed.machine.owned`) and is swept when its lab is dead; what else lies in the root is somebody's and stays.
"""

import fcntl
import json
import os
import signal
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.lab import cgroups
from testbed.machine import owned


class LabError(Exception):
    """A lab cannot do what was asked; one sentence with the next step."""


ROOTS_LABS = Path("/run/pddbed")
MAX_SOCKET_PATH = 107  # sun_path without its NUL, unix(7)
ELSEWHERE = 0  # stands for the guardian's pid where it lives outside this process's PID namespace
KIND = "lab record"
_LOCK_NAME = ".lock"


def state_root() -> Path:
    """Directory of this user's lab records. Root's labs are readable by everybody.

    XDG_RUNTIME_DIR counts only where it is this user's own: `su` and `sudo -E` keep that of somebody else.
    """
    if os.geteuid() == 0:
        return ROOTS_LABS
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and _is_own_directory(Path(runtime)):
        return Path(runtime) / "pddbed"
    try:
        return Path(tempfile.gettempdir()) / f"pddbed-{os.geteuid()}"
    except FileNotFoundError as error:
        raise LabError(f"no place for the records of labs: {error.strerror}; set XDG_RUNTIME_DIR or TMPDIR") from None


def _is_own_directory(path: Path, uid: int | None = None) -> bool:
    """True when only its owner, this user where no `uid` is named, can change what lies in the directory."""
    try:
        found = path.lstat()
    except OSError:
        return False
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == (os.geteuid() if uid is None else uid)
    return mine and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@dataclass(frozen=True, slots=True)
class Record:
    """Paths of one lab's record."""

    directory: Path

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def control_socket(self) -> Path:
        return self.directory / "control.sock"

    @property
    def events_socket(self) -> Path:
        """Socket where serving events are told, while a timeline plays."""
        return self.directory / "events.sock"

    @property
    def links_file(self) -> Path:
        """File of what the links are now, for the workers: see `link_table`."""
        return self.directory / "links.now"

    @property
    def unwritten_file(self) -> Path:
        """File in which workers count what they could not write: see `troubles`."""
        return self.directory / "unwritten.now"

    @property
    def state_file(self) -> Path:
        return self.directory / "state.json"

    @property
    def origin_file(self) -> Path:
        """File of who raised the lab; see `origin`."""
        return self.directory / "origin.json"

    @property
    def lock_file(self) -> Path:
        return self.directory / "guardian.lock"

    @property
    def hosts_file(self) -> Path:
        return self.directory / "hosts"

    @property
    def results(self) -> Path:
        return self.directory / "records"

    @property
    def logs(self) -> Path:
        """Logs of the lab's own processes, the relays' among them."""
        return self.directory / "logs"

    @property
    def host_logs(self) -> Path:
        """Logs of the hosts, apart: a host may be called `guardian`."""
        return self.logs / "hosts"

    def log(self, name: str) -> Path:
        """The log of one of the lab's own processes, such as `guardian`."""
        return self.logs / f"{name}.log"

    def host_log(self, host: str) -> Path:
        """The log of a host's process."""
        return self.host_logs / f"{host}.log"

    def state(self) -> dict[str, Any]:
        """State that the supervisor last wrote; {} while the lab is starting, or where the file was tampered with."""
        try:
            state = json.loads(self.state_file.read_text())
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def losses(self) -> list[str]:
        """Losses of the lab since it came up, a sentence each; [] while it is whole, or starting."""
        lost = self.state().get("lost")
        return [f"{name} {how}" for name, how in sorted(lost.items())] if isinstance(lost, dict) else []

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace the state file in one step, so that no reader sees half of it."""
        partial = self.state_file.with_suffix(".partial")
        partial.write_text(json.dumps(state, indent=1))
        partial.rename(self.state_file)

    def take(self) -> int:
        """Become the guardian of this lab: the lock is held until this process ends. Returns the open fd."""
        fd = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd

    def guardian_pid(self) -> int | None:
        """The process that holds the lock, or None when the lab is dead (or was never started).

        `ELSEWHERE` when it lives outside this process's PID namespace: whoever asks is inside a lab or a container. No
        other number below 1 is ever returned.
        """
        try:
            fd = os.open(self.lock_file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != self.directory.lstat().st_uid:
                return None
            # Asked as a reader: another reader's lock, which every user may hold, is none that counts, and to hold the
            # writer's one must be able to write.
            # struct flock { short type, whence; off_t start, len; pid_t pid; } on 64-bit Linux
            request = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, request))
        except OSError:
            return None
        finally:
            os.close(fd)
        # The kernel says -1 of a lock that belongs to an open file instead of a process; a guardian's does not.
        return None if kind == fcntl.F_UNLCK or pid < 0 else pid

    def signal_guardian(self, guardian: int, number: int) -> bool:
        """Send `number` to the process that holds the lock, if it is still `guardian`; False when it is not.

        Raises PermissionError. What is signalled is held by a descriptor while the lock is read again, so that its
        number cannot have gone to another process.
        """
        if guardian <= 0:
            return False
        try:
            process = os.pidfd_open(guardian)
        except ProcessLookupError:
            return False
        try:
            if self.guardian_pid() != guardian:
                return False
            signal.pidfd_send_signal(process, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(process)
        return True

    def is_dead(self) -> bool:
        """True when this is a record, and no lab's."""
        return owned.is_ours(self.directory, KIND) and self.guardian_pid() is None

    def is_held_by(self, lock: int) -> bool:
        """True when `lock`, as `take` returned it, is still this record's: somebody may have removed the record since,
        and a new lab of the same name made another."""
        try:
            found, held = self.lock_file.stat(), os.fstat(lock)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)

    def sweep(self) -> None:
        """Remove what the kernel does not: cgroup directories and the record itself. Only for a dead lab.

        The record moves aside in one step first, so that a new lab may take the name at once. What is no record stays.
        """
        if not owned.is_ours(self.directory, KIND):
            return
        cgroups.remove_lab(self.name)
        doomed = self.directory.with_name(f".{self.name.lstrip('.')}.{os.getpid()}.{time.monotonic_ns()}")
        try:
            self.directory.rename(doomed)
        except FileNotFoundError:
            return
        owned.remove(doomed, KIND)


@contextmanager
def registry() -> Iterator[Path]:
    """Hold the lock on the set of labs, so that creating and sweeping one exclude each other.

    Raises LabError when there is no place for records, or when it is not this user's own.
    """
    root = state_root()
    try:
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not _is_own_directory(root):
            raise LabError(
                f"{root} must be a directory of this user that nobody else can write to; correct it or remove it"
            )
        fd = os.open(root / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise LabError(
            f"cannot keep the records of labs in {root} ({error.strerror}); make room there, or make it writable"
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield root
    finally:
        os.close(fd)


def _entries(root: Path) -> list[Record]:
    """Whatever lies in a root of records, the lock apart; nothing where one cannot look, or others can write."""
    if not _is_own_directory(root, 0 if root == ROOTS_LABS else None):
        return []
    try:
        return [Record(path) for path in sorted(root.iterdir()) if path.name != _LOCK_NAME]
    except OSError:
        return []


def refuse_taken(root: Path, name: str) -> None:
    """Raises LabError when a living lab has the name. Call inside `registry()`."""
    if Record(root / name).guardian_pid() is not None:
        raise LabError(f'lab "{name}" is already up; take it down (pddbed down {name}) or choose another --name')


def create_record(root: Path, name: str) -> Record:
    """Reserve a name, sweeping a dead lab of the same name. Call inside `registry()`. Raises LabError."""
    refuse_taken(root, name)
    record = Record(root / name)
    if len(os.fsencode(record.control_socket)) > MAX_SOCKET_PATH:
        raise LabError(
            f"{record.control_socket} is too long for the path of a socket (at most {MAX_SOCKET_PATH} bytes); choose a"
            " shorter --name, or a shorter XDG_RUNTIME_DIR or TMPDIR"
        )
    record.sweep()
    try:
        made = Record(owned.make_aside(root, name, KIND))
        try:
            made.directory.chmod(0o755)
            made.host_logs.mkdir(parents=True)
            made.results.mkdir()
            made.directory.rename(record.directory)
        finally:
            owned.remove(made.directory, KIND)
    except OSError as error:
        if os.path.lexists(record.directory):
            raise LabError(
                f"{record.directory} is in the way, and no record that pddbed made; move it, or choose another --name"
            ) from None
        raise LabError(
            f'cannot make the record of lab "{name}" in {root} ({error.strerror}); make room there, or make it writable'
        ) from None
    return record


def sweep_dead() -> list[str]:
    """Sweep every dead lab of this user, and what crashes have left; returns the names of the labs."""
    swept = []
    with suppress(LabError):  # nothing can be swept where records cannot be kept
        if not any(record.is_dead() for record in _entries(state_root())):
            return []
        with registry() as root:
            for record in _entries(root):
                if record.is_dead():
                    record.sweep()
                    if not record.name.startswith("."):
                        swept.append(record.name)
    return swept


def live_records() -> list[Record]:
    """The living labs that this user can see: their own, and root's."""
    roots = dict.fromkeys([state_root(), ROOTS_LABS])
    found = [record for root in roots for record in _entries(root) if not record.name.startswith(".")]
    return [record for record in found if record.guardian_pid() is not None]


def find_record(name: str | None) -> Record:
    """The named lab, or the only one, this user's own before root's. LabError lists the choices otherwise."""
    records = live_records()
    names = ", ".join(record.name for record in records)
    if name is not None:
        for record in records:
            if record.name == name:
                return record
        raise LabError(
            f'no lab "{name}" is up; ' + (f"these are: {names}" if names else "start one with: pddbed up FILE")
        )
    if not records:
        raise LabError("no lab is up; start one with: pddbed up FILE")
    own = [record for record in records if record.directory.parent == state_root()]
    if len(own or records) > 1:
        raise LabError(f"several labs are up ({names}); name one with --lab")
    return (own or records)[0]
