"""The namespaces in which a run happens: whatever ends it, the kernel ends every process of it and undoes every mount.

Outside, `run` starts a child in new PID and mount namespaces and waits; nothing of the run lives outside. Inside,
PID 1 reaps, /mnt is the run's own short-named place, and /etc is a copy whose passwd has one user more: an ordinary
one for Vagrant and libvirt's session.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from testbed.machine import owned
from testbed.machine import programs as interpreter
from testbed.vagrant.machine import NAME, Guest, choose_user
from workers.linux import die_with_parent

KIND = "Vagrant run"
PLACE = Path("/mnt")  # socket paths below it must stay under 108 bytes, wherever the cache is


def run(module: str, arguments: list[str]) -> int:
    """Run `python -m module ARGUMENTS` inside; its exit status. A signal to this process ends all of it at once."""
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    process = subprocess.Popen(
        [*command, "--", *interpreter.program(module), *arguments],
        env=interpreter.environment(),
        start_new_session=True,  # a Ctrl-C is for this process, which ends the others
        preexec_fn=_follow_parent,
    )
    ended_by = 0

    def end(number: int, _frame: object) -> None:
        nonlocal ended_by
        ended_by = number
        process.kill()  # --kill-child then ends PID 1 inside, and the kernel all others

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    init = _first_child(process)
    status = process.wait()
    if init is not None:
        select.select([init], [], [])  # readable once PID 1 has ended, and that is after all others
        os.close(init)
    return 128 + ended_by if ended_by else status


def _follow_parent() -> None:
    """Make the child, before unshare, end when this process does, however it does."""
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _first_child(process: subprocess.Popen[bytes]) -> int | None:
    """A pidfd of the process that unshare forks, PID 1 inside; None when unshare ends without."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        try:
            found = children.read_text().split()
            if found:
                return os.pidfd_open(int(found[0]))
        except OSError:
            pass
        time.sleep(0.01)
    return None


def become_init(main: Callable[[], int]) -> None:
    """Be PID 1: run `main` in a child, reap everything, exit with its status. Does not return.

    libvirt asks whether a process is gone by its pid, and a zombie is not gone.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = main()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def furnish(work: Path, boxes: Path | None) -> Guest:
    """Mount the run's places below /mnt (home and project from `work`, boxes read-only) and add its user."""
    guest = choose_user()
    _mount("-t", "tmpfs", "-o", "mode=755,size=256m", "tmpfs", str(PLACE))
    for name in ("home", "project"):
        (work / name).mkdir(exist_ok=True)
        os.chown(work / name, guest.uid, guest.uid)
        (PLACE / name).mkdir()
        _mount("--bind", str(work / name), str(PLACE / name))
    if boxes is not None:
        (PLACE / "boxes").mkdir()
        _mount("--bind", "-o", "ro", str(boxes), str(PLACE / "boxes"))
    # All of /etc: a mount on one file of it would be gone as soon as somebody replaces that file.
    private = PLACE / "etc"
    subprocess.run(["cp", "-a", "/etc/.", str(private)], check=True)
    for name, line in (
        ("passwd", f"{NAME}:x:{guest.uid}:{guest.uid}::{PLACE}/home:/bin/bash\n"),
        ("group", f"{NAME}:x:{guest.uid}:\n"),
    ):
        (private / name).write_text(Path("/etc", name).read_text().rstrip("\n") + "\n" + line)
    _mount("--bind", str(private), "/etc")
    return guest


def hurry(name: str, niceness: int) -> None:
    """Let the sandbox's processes of this name go before others: to an emulated guest, every moment that it waits for a
    CPU is one in which packets are late. Where autogroups are on, only the group's nice value counts.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "comm").read_text().strip() == name:
                os.setpriority(os.PRIO_PROCESS, int(process.name), niceness)
                (process / "autogroup").write_text(str(niceness))


def own(directory: Path, guest: Guest) -> None:
    """Give a tree to the run's user."""
    for path in (directory, *directory.rglob("*")):
        os.chown(path, guest.uid, guest.uid, follow_symlinks=False)


def remove(work: Path) -> None:
    """Remove a run's directory, when the run is over."""
    owned.remove(work, KIND)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
