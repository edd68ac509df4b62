"""The relay's loop: reads packets from two TUN devices, writes each when its time comes, answers the lab.

Owns the waiting. `select` takes microseconds (epoll and poll take milliseconds, which cost 0.4 ms a round
trip) and its timer is exact for a real-time thread.
"""

import os
from select import select
from time import monotonic_ns

from testbed.links.relay.control import Control
from testbed.links.relay.lane import Lane
from testbed.links.relay.packet import READ_BYTES

# Packets read from one device before the other lane's due frames are looked at again (64 KiB take ~15 us).
_BATCH = 8
_LONGEST_WAIT_NS = 1_000_000_000
# Waking an idle CPU takes 50-150 us. After a pause of 2 ms or more the loop wakes this much early and polls until
# the frame is due: at most 4 % of a CPU, and none of it when frames are frequent (the CPU is then awake anyway).
_EARLY_NS = 80_000
_PAUSE_NS = 2_000_000
_WINDOW_NS = 1_000_000_000


class Load:
    """How busy the process is: the share of wall time not spent waiting, over windows of one second."""

    def __init__(self, now: int) -> None:
        self._window_start = now
        self._waited_ns = 0
        self.busy_last = 0.0
        self.busy_max = 0.0

    def waited(self, before: int, now: int) -> None:
        self._waited_ns += now - before
        elapsed = now - self._window_start
        if elapsed >= _WINDOW_NS:
            self.busy_last = 1.0 - self._waited_ns / elapsed
            self.busy_max = max(self.busy_max, self.busy_last)
            self._window_start, self._waited_ns = now, 0


def run(lanes: dict[int, Lane], control: Control, load: Load) -> None:
    """Carry packets until the control socket closes. `lanes` maps the descriptor to read from to its lane.

    Raises OSError when a device is gone (its router's namespace ended): there is nothing left to wait for.
    """
    control_fd = control.fileno()
    descriptors = [*lanes, control_fd]
    both = tuple(lanes.values())
    early_for = 0  # the deadline for which the loop wakes early and polls
    while True:
        now = monotonic_ns()
        deadline = now + _LONGEST_WAIT_NS
        for lane in both:
            due = lane.emit(now, monotonic_ns)
            if due < deadline:
                deadline = due
        before = monotonic_ns()
        wait = deadline - before
        if wait > _PAUSE_NS or deadline == early_for:
            early_for = deadline
            wait -= _EARLY_NS
        readable, _, _ = select(descriptors, (), (), max(0, wait) / 1e9)
        load.waited(before, monotonic_ns())
        for fd in readable:
            if fd == control_fd:
                if not control.answer():
                    return
            else:
                _drain(fd, lanes[fd])


def _drain(fd: int, lane: Lane) -> None:
    """Read what is waiting, a batch at most, writing what falls due in between."""
    for _ in range(_BATCH):
        # Stamped before the read: the packet was there already, and copying it is not part of its delay.
        now = monotonic_ns()
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return
        lane.arrive(data, now)
        lane.emit(now, monotonic_ns)
