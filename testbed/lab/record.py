"""A lab's record: the directory under /run that says a lab exists, and whether it is alive.

Owns names, paths, locking and sweeping. A lab is alive exactly while its guardian holds the POSIX lock on
`guardian.lock`; the kernel drops that lock however the guardian dies, so no pid file can lie.
"""

import fcntl
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.lab import cgroups


class LabError(Exception):
    """A lab cannot do what was asked; one sentence with the next step."""


def state_root() -> Path:
    """Where this user's labs are recorded. Root's labs are readable by everybody."""
    if os.geteuid() == 0:
        return Path("/run/pddbed")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "pddbed" if runtime else Path(tempfile.gettempdir()) / f"pddbed-{os.geteuid()}"


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
        """Where serving events are told, while a timeline plays."""
        return self.directory / "events.sock"

    @property
    def state_file(self) -> Path:
        return self.directory / "state.json"

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
        """What the supervisor last wrote; {} while the lab is starting."""
        try:
            state: dict[str, Any] = json.loads(self.state_file.read_text())
            return state
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

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
        """The process that holds the lock, or None when the lab is dead (or was never started)."""
        try:
            fd = os.open(self.lock_file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            # struct flock { short type, whence; off_t start, len; pid_t pid; } on 64-bit Linux
            request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, request))
        finally:
            os.close(fd)
        return None if kind == fcntl.F_UNLCK else pid

    def sweep(self) -> None:
        """Remove what the kernel does not: cgroup directories and the record itself. Only for a dead lab."""
        cgroups.remove_lab(self.name)
        shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def registry() -> Iterator[Path]:
    """Hold the lock on the set of labs, so that creating and sweeping one exclude each other."""
    root = state_root()
    root.mkdir(mode=0o755, parents=True, exist_ok=True)
    fd = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield root
    finally:
        os.close(fd)


def _records(root: Path) -> list[Record]:
    try:
        return [Record(path) for path in sorted(root.iterdir()) if path.is_dir()]
    except FileNotFoundError:
        return []


def create_record(root: Path, name: str) -> Record:
    """Reserve a name, sweeping a dead lab of the same name. Call inside `registry()`."""
    record = Record(root / name)
    if record.directory.exists():
        if record.guardian_pid() is not None:
            raise LabError(f'lab "{name}" is already up; take it down (pddbed down {name}) or choose another --name')
        record.sweep()
    record.directory.mkdir(mode=0o755)
    record.host_logs.mkdir(parents=True)
    record.results.mkdir()
    return record


def sweep_dead() -> list[str]:
    """Sweep every dead lab of this user; returns their names."""
    if not state_root().exists():
        return []
    swept = []
    with registry() as root:
        for record in _records(root):
            if record.guardian_pid() is None:
                record.sweep()
                swept.append(record.name)
    return swept


def live_records() -> list[Record]:
    """The living labs that this user can see: their own, and root's."""
    roots = dict.fromkeys([state_root(), Path("/run/pddbed")])
    return [record for root in roots for record in _records(root) if record.guardian_pid() is not None]


def find_record(name: str | None) -> Record:
    """The named lab, or the only one. LabError lists the choices otherwise."""
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
    if len(records) > 1:
        raise LabError(f"several labs are up ({names}); name one with --lab")
    return records[0]
