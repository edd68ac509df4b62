"""Runs a command inside a host of a running lab: joins its PID, network and mount namespaces.

Joining the PID namespace matters: the command dies with the lab and cannot keep a dead lab's network alive.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from testbed.lab.control import ask_lab
from testbed.lab.record import Record
from testbed.netns import CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWUSER, setns

KINDS = {"user": CLONE_NEWUSER, "pid": CLONE_NEWPID, "net": CLONE_NEWNET, "mnt": CLONE_NEWNS}


def run_inside(record: Record, host: str, command: list[str], environment: dict[str, str] | None = None) -> int:
    """Run `command` on `host` with this process's standard streams; returns its status (128 + n for signal n)."""
    reply, fds = ask_lab(record, {"op": "enter", "host": host})
    namespaces = dict(zip(reply["namespaces"], fds, strict=True))
    # Only the child joins: a process outside that stayed in the lab's network would keep it alive.
    child = os.fork()
    if child == 0:
        try:
            _become(namespaces, command, {**os.environ, **(environment or {})})
        except BaseException as error:
            print(f"pddbed: {error}", file=sys.stderr, flush=True)
            os._exit(126)
    for fd in fds:
        os.close(fd)
    return _wait(child)


def _become(namespaces: dict[str, int], command: list[str], environment: dict[str, str]) -> None:
    """Join the namespaces, fork into the PID namespace, replace the child with the command."""
    own_user = Path("/proc/self/ns/user").stat().st_ino
    directory = Path.cwd()
    if os.fstat(namespaces["user"]).st_ino != own_user:
        setns(namespaces["user"], KINDS["user"])
    setns(namespaces["pid"], KINDS["pid"])  # takes effect for children only, hence the fork
    inner = os.fork()
    if inner:
        for fd in namespaces.values():
            os.close(fd)
        os._exit(_wait(inner))
    for kind in ("net", "mnt"):
        setns(namespaces[kind], KINDS[kind])
    for fd in namespaces.values():
        os.close(fd)
    with suppress(FileNotFoundError):
        os.chdir(directory)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except FileNotFoundError:
        print(f"pddbed: {command[0]}: no such command on this machine", file=sys.stderr, flush=True)
        os._exit(127)


def _wait(child: int) -> int:
    """The child's status. The terminal's signals are the child's business."""
    ignored = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in ignored.items():
            signal.signal(number, handler)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
