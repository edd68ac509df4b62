"""Runs a command inside a host of a running lab: joins its PID, network and mount namespaces.

Joining the PID namespace matters: the command dies with the lab and cannot keep a dead lab's network alive.
"""

import errno
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from testbed.lab.control import ask_for_descriptors
from testbed.lab.environment import fitting
from testbed.lab.messages import Enter
from testbed.lab.record import Record
from workers.linux import CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWUSER, die_with_parent, setns

KINDS = {"user": CLONE_NEWUSER, "pid": CLONE_NEWPID, "net": CLONE_NEWNET, "mnt": CLONE_NEWNS}


def run_inside(record: Record, host: str, command: list[str], environment: dict[str, str] | None = None) -> int:
    """Run `command` on `host` with this process's standard streams; returns its status (128 + n for signal n).

    Its environment is this process's, the host's own variables (docs/environment.md) and what `environment` adds.
    The command ends with this process: SIGTERM and SIGHUP are passed on, and SIGKILL takes it along.
    """
    reply, fds = ask_for_descriptors(record, Enter(host))
    variables, left_out = fitting(reply.environment)
    for name in left_out:
        print(f"pddbed: {name} is not set, too long for the kernel in a lab of so many hosts", file=sys.stderr)
    namespaces = dict(zip(reply.namespaces, fds, strict=True))
    # Only the child joins: a process outside that stayed in the lab's network would keep it alive.
    child = os.fork()
    if child == 0:
        try:
            _become(namespaces, command, {**os.environ, **variables, **(environment or {})})
        except Exception as error:
            # ENOMEM is the kernel's answer to a fork into a PID namespace whose PID 1 is gone.
            gone = getattr(error, "errno", None) == errno.ENOMEM
            print(f'pddbed: lab "{record.name}" has ended' if gone else f"pddbed: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(126)
    for fd in fds:
        os.close(fd)
    return _wait(child)


def _become(namespaces: dict[str, int], command: list[str], environment: dict[str, str]) -> None:
    """Join the namespaces, fork into the PID namespace, replace the child with the command."""
    own_user = Path("/proc/self/ns/user").stat().st_ino
    directory = _working_directory()
    if os.fstat(namespaces["user"]).st_ino != own_user:
        setns(namespaces["user"], KINDS["user"])
    _die_with_parent()
    setns(namespaces["pid"], KINDS["pid"])  # takes effect for children only, hence the fork
    inner = os.fork()
    if inner:
        for fd in namespaces.values():
            os.close(fd)
        os._exit(_wait(inner))
    _die_with_parent()
    for kind in ("net", "mnt"):
        setns(namespaces[kind], KINDS[kind])
    for fd in namespaces.values():
        os.close(fd)
    if directory is not None:
        with suppress(OSError):
            os.chdir(directory)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except FileNotFoundError:
        print(f"pddbed: {command[0]}: no such command on this machine", file=sys.stderr, flush=True)
        os._exit(127)
    except (OSError, ValueError) as error:
        print(f"pddbed: {command[0]}: {getattr(error, 'strerror', None) or error}", file=sys.stderr, flush=True)
        os._exit(126)


def _working_directory() -> str | None:
    """Directory of the caller; None when that directory is gone. The command starts in / then."""
    try:
        return os.getcwd()  # noqa: PTH109  (Path.cwd() is no shorter for a string that may fail)
    except OSError:
        return None


def _die_with_parent() -> None:
    die_with_parent()


def _wait(child: int) -> int:
    """The child's status. The terminal's signals are the child's business; the others are passed on to it."""

    process = os.pidfd_open(child)  # once it has been waited for, its number may be another's

    def pass_on(number: int, _frame: object) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, number)

    before: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.getsignal(number)
        if before[number] != signal.SIG_IGN:  # nohup stays in force
            signal.signal(number, signal.SIG_IGN if number in (signal.SIGINT, signal.SIGQUIT) else pass_on)
    try:
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(process)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
