"""One command for the VM, as files that the guest reads: argv, environment, place, nonce, output directory.

Owns the job directory's layout (guest/session.sh reads it) and its removal. A directory carries our mark and is locked
while its process lives, so that a later run can sweep what a killed one left, and nothing else.
"""

import fcntl
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from testbed.machine import owned

KIND = "VM job"
SESSION_SCRIPT = Path(__file__).parent / "guest" / "session.sh"
GUEST_OUTPUT = "/job/out"  # in the guest; named by PDDBED_VM_OUTPUT there
# Emulated timers: half are 0.1 ms late, one in a hundred 5 ms, on a busy machine some even 50 ms.
TIMER_LATENESS_NS = 50_000_000
# Loaded at start: a network namespace or an unprivileged process may be unable to load them on demand.
LOADED_MODULES = (
    *("tun", "veth", "bridge", "ifb", "dummy"),
    *("sch_netem", "sch_tbf", "sch_htb", "sch_fq", "sch_fq_codel", "sch_prio", "sch_ingress"),
    *("tcp_bbr", "af_packet", "unix_diag", "tcp_diag", "udp_diag"),
)
PASSED_VARIABLES = (
    "HOME",
    "LANG",
    "LC_ALL",
    "CI",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "USER",
    "LOGNAME",
    "NO_COLOR",
)


@dataclass(frozen=True, slots=True)
class VmJob:
    """One command and the machine that it gets. `argv` and `environment` may hold any bytes but NUL."""

    argv: tuple[str, ...]
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0  # from start to last byte, boot included
    memory: str = "4G"  # as QEMU writes it
    cpus: int = 2
    output: Path | None = None  # receives what the command writes below $PDDBED_VM_OUTPUT


def guest_environment(caller: Mapping[str, str], extra: Sequence[str] = ()) -> dict[str, str]:
    """The part of the caller's environment that the command sees: a short list, PDDBED_*, and the names in `extra`.

    This interpreter's programs come first on PATH, since sudo's PATH lacks a virtual environment.
    """
    chosen = {name: caller[name] for name in (*PASSED_VARIABLES, *extra) if name in caller}
    chosen |= {name: value for name, value in caller.items() if name.startswith("PDDBED_")}
    path = caller.get("PATH", os.defpath)
    chosen["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), path, "/usr/sbin", "/sbin"])
    chosen["PDDBED_VM"] = "1"
    chosen["PDDBED_TIMER_LATENESS_NS"] = str(TIMER_LATENESS_NS)
    chosen["PDDBED_VM_OUTPUT"] = GUEST_OUTPUT
    return chosen


@contextmanager
def job_directory(job: VmJob, module_tree: Path, parent: Path) -> Iterator[tuple[Path, bytes]]:
    """The written job below `parent`, and its nonce; removed afterwards."""
    owned.sweep(parent, KIND)
    directory = Path(tempfile.mkdtemp(prefix="job-", dir=parent))
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    owned.mark(directory, KIND)  # what is marked and not locked may be swept
    try:
        nonce = secrets.token_hex(16).encode()
        (directory / "out").mkdir()
        (directory / "session.sh").write_bytes(SESSION_SCRIPT.read_bytes())
        (directory / "argv").write_bytes(_nul_separated(job.argv))
        (directory / "env").write_bytes(_nul_separated(f"{k}={v}" for k, v in job.environment.items()))
        (directory / "cwd").write_bytes(_nul_separated([str(job.directory.absolute())]))
        # Resolved here: the guest mounts it before the host's root is its root, where links lead elsewhere.
        (directory / "modules").write_bytes(os.fsencode(module_tree.resolve()))
        (directory / "load").write_text("".join(f"{name}\n" for name in LOADED_MODULES))
        (directory / "nonce").write_bytes(nonce)
        yield directory, nonce
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def copy_output(directory: Path, target: Path) -> list[str]:
    """Copy what the guest left in out/ to `target`; returns the names of sockets, pipes and the like."""
    skipped: list[str] = []

    def ignore(folder: str, names: list[str]) -> list[str]:
        odd = [name for name in names if not _copyable(Path(folder, name))]
        skipped.extend(odd)
        return odd

    shutil.copytree(directory / "out", target, symlinks=True, ignore=ignore, dirs_exist_ok=True)
    return skipped


def _copyable(path: Path) -> bool:
    return path.is_symlink() or path.is_file() or path.is_dir()


def _nul_separated(items: Sequence[str] | Iterator[str]) -> bytes:
    return b"".join(os.fsencode(item) + b"\0" for item in items)
