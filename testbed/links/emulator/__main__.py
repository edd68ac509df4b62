"""The emulator process: `python -m testbed.links.emulator TUN_A TUN_B CONTROL`, three inherited descriptors.

Owns what makes a Python process punctual: real-time priority, locked memory, no garbage collection, a heap
that is not given back and faulted in again. The first control line is the start message (see `_start`).
"""

import gc
import json
import os
import signal
import socket
import sys
from functools import partial
from time import monotonic_ns

import msgspec

from testbed.links.emulator.control import Control
from testbed.links.emulator.lane import Lane
from testbed.links.emulator.load import Load
from testbed.links.emulator.loop import run
from testbed.links.emulator.messages import Health, Start
from testbed.links.emulator.tun import write_frame
from testbed.model.impairment import Impairment
from workers import linux

_FIFO_PRIORITY = 20


def main() -> None:
    tun_a, tun_b, control_fd = (_lowest(int(argument)) for argument in sys.argv[1:4])
    sock = socket.socket(fileno=control_fd)
    _die_with_parent()
    realtime, refused, locked = _be_punctual()
    start = _start(sock)
    if start is None:
        return
    now = monotonic_ns()
    lanes = {
        name: Lane(
            Impairment.from_dict(side.impairment),
            side.line_limit_bytes,
            partial(write_frame, fd),
            now,
            seed=f"{start.seed}/{start.name}/{name}",
        )
        for name, side, fd in (("forward", start.forward, tun_b), ("backward", start.backward, tun_a))
    }
    load = Load(now)

    def health() -> Health:
        return {
            "pid": os.getpid(),
            "busy_last": round(load.busy_last, 4),
            "busy_max": round(load.busy_max, 4),
            "busy_max_measuring": round(load.busy_max_measuring, 4),
            "realtime": realtime,
            "realtime_refused": refused,
            "memory_locked": locked,
        }

    sock.setblocking(False)
    control = Control(sock, lanes, load, health)
    sock.sendall(json.dumps({"id": start.id, "ok": True, **health()}).encode() + b"\n")
    gc.collect()
    gc.freeze()
    gc.disable()  # nothing in the loop makes cycles
    try:
        run({tun_a: lanes["forward"], tun_b: lanes["backward"]}, control, load)
    except OSError as error:
        sys.exit(f"a TUN device of wan {start.name} is gone: {error.strerror}")


def _lowest(fd: int) -> int:
    """The same file under the lowest free number: `select` ends at 1024, a busy lab's descriptors may not."""
    copy = os.dup(fd)
    os.close(fd)
    return copy


def _start(sock: socket.socket) -> Start | None:
    """The start message; None where the lab is gone."""
    line = sock.makefile("rb").readline()
    return msgspec.json.decode(line, type=Start) if line else None


def _die_with_parent() -> None:
    """End with the process that started us, also where a forked copy of it still holds our control socket.

    The kernel sends the signal when the parent *thread* ends; that alone is no reason to go.
    """
    parent = os.getppid()

    def parent_thread_ended(_signal: int, _frame: object) -> None:
        if os.getppid() != parent:
            os._exit(0)

    signal.signal(signal.SIGUSR1, parent_thread_ended)
    linux.die_with_parent(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the lab's to handle
    if os.getppid() != parent:
        os._exit(0)


def _be_punctual() -> tuple[bool, str, bool]:
    """Ask the kernel for punctuality: whether there is real time, why not, and whether memory is locked."""
    linux.mallopt(linux.M_MMAP_THRESHOLD, 32 << 20)
    linux.mallopt(linux.M_TRIM_THRESHOLD, 1 << 30)
    linux.mallopt(linux.M_TOP_PAD, 1 << 20)
    linux.set_timer_slack()
    try:
        linux.call("mlockall", linux.MCL_CURRENT | linux.MCL_FUTURE)
        locked = True
    except OSError:
        locked = False
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_FIFO_PRIORITY))
    except OSError as error:
        refused = f"SCHED_FIFO refused: {error.strerror}"
        try:
            os.setpriority(os.PRIO_PROCESS, 0, -20)
        except OSError:
            refused += "; nice -20 refused too"
        return False, refused, locked
    return True, "", locked


if __name__ == "__main__":
    main()
