"""Linux calls that Python has no function for, and real-time priority. Standard library only; the testbed's as well."""

import ctypes
import os
import signal
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
MCL_CURRENT, MCL_FUTURE = 1, 2
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_TIMERSLACK = 1, 15, 29
FIFO_PRIORITY = 1  # of a worker: the lowest, since an emulated link, which serves everybody, goes first

_libc = ctypes.CDLL(None, use_errno=True)  # loaded before any fork that uses it


def call(name: str, *args: Any) -> int:
    """Call a libc function; a negative result raises OSError with errno and the function's name."""
    result: int = getattr(_libc, name)(*args)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def setns(fd: int, kind: int) -> None:
    """Move the calling thread into the namespace behind `fd`."""
    call("setns", fd, kind)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the parent *thread* ends; the caller looks if it already has."""
    call("prctl", PR_SET_PDEATHSIG, number, 0, 0, 0)


def name_process(name: str) -> None:
    """Set what `ps` and /proc/PID/comm show (15 bytes)."""
    call("prctl", PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def set_timer_slack() -> None:
    """Let timers of the calling thread, and of threads it makes, fire within a nanosecond of their time, not 50 us."""
    call("prctl", PR_SET_TIMERSLACK, 1, 0, 0, 0)


def mallopt(parameter: int, value: int) -> None:
    """Set a parameter of malloc for this process, where the C library has such."""
    if function := getattr(_libc, "mallopt", None):
        function(parameter, value)


class RealTimePriority:
    """SCHED_FIFO for the calling thread, in the moments in which a paced worker must not be late.

    A step that is due has to wake a thread, and that one the event loop. On a busy machine each waits some milliseconds
    for its turn, behind whatever computes; with SCHED_FIFO it waits for nobody. Computing itself never has it: a
    machine full of real-time work would stand still. Priorities are a thread's own (sched(7)). Without permission (an
    ordinary user, a cgroup with a quota) nothing changes.
    """

    def __init__(self) -> None:
        self.permitted = True

    def begin(self) -> None:
        """Go ahead of all that computes, from now on; threads made by this one do not."""
        self._set(os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, FIFO_PRIORITY)

    def end(self) -> None:
        """Wait like everybody."""
        self._set(os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, 0)

    def _set(self, policy: int, priority: int) -> None:
        if not self.permitted:
            return
        try:
            os.sched_setscheduler(0, policy, os.sched_param(priority))
        except OSError:
            self.permitted = False
