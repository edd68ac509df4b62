"""The lab's sandbox: a guardian outside, and inside new network, PID and mount namespaces a reaper as PID 1
whose child is the supervisor.

    pddbed up --fork--> guardian --fork--> PID 1 (reaper) --fork--> supervisor --> Mininet, emulators, workers

When the supervisor ends, however it ends, PID 1 exits and the kernel removes every process and interface of the
lab; the guardian then sweeps what the kernel does not know: cgroup directories and the record. When the guardian
ends first, PID 1 gets SIGKILL, and the next pddbed command sweeps. Owns no networking and no control protocol.
"""

import ctypes
import itertools
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from testbed.lab.record import Record
from workers.linux import CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWUSER, call, die_with_parent, name_process

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
WATCH_MS = 2000  # how often the guardian looks for its lab's record
READY, PROBLEM_BYTES = b"\0", 1000
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class SandboxError(Exception):
    """The guardian could not be started; one sentence."""


def start(record: Record, supervisor: Callable[[], int], tether: int, started: int, keep: tuple[int, ...] = ()) -> int:
    """Fork the guardian of `record`; returns its pid once it holds the record's lock. Raises SandboxError.

    `supervisor` runs inside the sandbox, its result is the exit status. `tether` is the read end of a pipe whose
    write end only the caller holds: if that closes before a byte comes through, because the caller dies for one, the
    lab is taken down again. The supervisor inherits `started`, the write end of another pipe, and the descriptors in
    `keep`, nothing else; the caller's copies of `tether` and `started` are closed here.
    """
    held, holding = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # no Ctrl-C may find the child in its caller's code
    guardian = os.fork()
    if guardian:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for fd in (holding, tether, started):
            os.close(fd)
        said = os.read(held, PROBLEM_BYTES)
        os.close(held)
        if said != READY:
            os.waitpid(guardian, 0)
            raise SandboxError(f"the lab's guardian did not start ({said.decode() or 'it was killed'})")
        return guardian
    os.close(held)
    status, reporting = 1, True
    try:
        os.setsid()
        name_process("pddbed-guard")
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever ignores it cannot wait for a child
        _detach_output(record.log("guardian"))
        _close_all_but(holding, tether, started, *keep)
        lock = record.take()
        os.write(holding, READY)
        os.close(holding)
        reporting = False
        status = _guard(record, supervisor, tether, started, keep, lock)
    except BaseException as error:  # a forked child must never return into the caller's code
        if reporting:
            with suppress(OSError):
                os.write(holding, str(error).encode()[:PROBLEM_BYTES])
        else:
            print(f"guardian: {error!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _detach_output(log: Path) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    # Python has neither where the caller had closed them.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _close_all_but(*keep: int) -> None:
    """Drop every inherited descriptor, the registry's lock above all, so that none outlives its owner here."""
    edges = [2, *sorted(keep), os.sysconf("SC_OPEN_MAX")]
    for low, high in itertools.pairwise(edges):
        os.closerange(low + 1, high)


def _guard(
    record: Record, supervisor: Callable[[], int], tether: int, started: int, keep: tuple[int, ...], lock: int
) -> int:
    """Run the sandbox to its end, then sweep. The signals of `ENDING`, blocked until here, end it at once."""
    user_namespace = CLONE_NEWUSER if os.geteuid() != 0 else 0
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", CLONE_NEWPID | user_namespace)
    if user_namespace:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    alive, guarding = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(guarding)
        os.close(tether)
        try:
            _run_init(record, supervisor, alive, (started, *keep))
        except OSError as error:
            print(f"the sandbox cannot be made: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    for fd in (alive, started, *keep):  # a listening socket held here would leave its clients waiting for ever
        os.close(fd)
    lab = os.pidfd_open(init)

    def end(number: int, _frame: object) -> None:
        print(f"guardian: asked to end by {signal.Signals(number).name}", file=sys.stderr, flush=True)
        _kill(lab)

    for number in ENDING:
        signal.signal(number, end)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _follow_tether(tether, lab)
    _watch_record(record, lock, lab)
    _, status = os.waitpid(init, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    os.close(guarding)
    if record.is_held_by(lock):
        record.sweep()
    return os.waitstatus_to_exitcode(status) & 0xFF


def _kill(lab: int) -> None:
    """SIGKILL to the PID 1 behind a pidfd, which may be over already."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(lab, signal.SIGKILL)


def _follow_tether(tether: int, lab: int) -> None:
    """Until the lab is up (a byte) or over: when the starting command vanishes, end the lab."""
    poll = select.poll()
    poll.register(tether, select.POLLIN)
    poll.register(lab, select.POLLIN)
    events = dict(poll.poll())
    if lab not in events and not os.read(tether, 1):
        _kill(lab)
    os.close(tether)


def _watch_record(record: Record, lock: int, lab: int) -> None:
    """Until the lab is over; a lab whose record somebody has removed is ended, since no command can find it."""
    poll = select.poll()
    poll.register(lab, select.POLLIN)
    while not poll.poll(WATCH_MS):
        if not record.is_held_by(lock):
            _kill(lab)
            return


def _run_init(record: Record, supervisor: Callable[[], int], alive: int, inherited: tuple[int, ...]) -> None:
    """PID 1 of the lab: set the stage, start the supervisor with the descriptors `inherited`, reap until it ends."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    die_with_parent()
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    if poll.poll(0):  # the guardian died before the line above took effect
        os._exit(1)
    call("unshare", CLONE_NEWNET | CLONE_NEWNS)
    _mount_private_views(record)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(alive)
            for number in ENDING:
                signal.signal(number, signal.SIG_DFL)
            name_process("pddbed-lab")
            status = supervisor()
        except BaseException:  # its way out is here: nothing above may run a second time in this process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    name_process("pddbed-init")
    for fd in inherited:
        os.close(fd)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                print(f"the supervisor was ended by signal {-code}", file=sys.stderr, flush=True)
            os._exit(code & 0xFF)


def _mount_private_views(record: Record) -> None:
    """A /proc and /sys of the lab's own namespaces, its own /etc/hosts, and nothing that spreads to the machine."""
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    cgroups = os.open("/sys/fs/cgroup", os.O_PATH | os.O_CLOEXEC) if Path("/sys/fs/cgroup").is_dir() else None
    _mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if cgroups is not None:
        _mount(f"/proc/self/fd/{cgroups}", "/sys/fs/cgroup", None, MS_BIND | MS_REC)
        os.close(cgroups)
    _mount(str(record.hosts_file), "/etc/hosts", None, MS_BIND)


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    try:
        call("mount", *encoded, ctypes.c_ulong(flags), None)
    except OSError as error:
        raise OSError(error.errno, f"mount {source or ''} on {target}: {os.strerror(error.errno or 0)}") from None
