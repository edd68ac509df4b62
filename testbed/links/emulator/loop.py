"""The emulator's loop: reads packets from two TUN devices, writes each when its time comes, answers the lab.

Owns the waiting. `select` takes microseconds (epoll and poll take milliseconds, which cost 0.4 ms a round
trip) and its timer is exact for a real-time thread.
"""

import os
from select import select
from time import monotonic_ns, time

from testbed.links.emulator.bottleneck import FOREVER
from testbed.links.emulator.control import Control
from testbed.links.emulator.lane import Lane
from testbed.links.emulator.lateness import LATE_NS
from testbed.links.emulator.load import Load, RunQueue
from testbed.links.emulator.packet import READ_BYTES

# Packets read from one device before the other lane's due frames are looked at again (64 KiB take ~15 us).
_BATCH = 8
# The loop wakes this often also when nothing is due: a process that was stopped cannot tell how long otherwise, nor
# then for how long packets have waited in the device.
_HEARTBEAT_NS = 4_000_000
# Waking an idle CPU takes 50-150 us. After a pause of 2 ms or more the loop wakes this much early and polls until
# the frame is due: at most 4 % of a CPU, and none of it when frames are frequent (the CPU is then awake anyway).
_EARLY_NS = 80_000
_PAUSE_NS = 2_000_000
# A wait that lasted longer than this was a wait: what is readable now was not there when it began.
_SLEPT_NS = 50_000


class Intake:
    """Time that packets may have waited in a device before they are read: since it was last known to be empty."""

    __slots__ = ("empty_at", "is_empty", "lane")

    def __init__(self, lane: Lane, now: int) -> None:
        self.lane = lane
        self.empty_at = now
        self.is_empty = True  # at `empty_at`, and as far as known since

    def empty(self, now: int) -> None:
        self.empty_at, self.is_empty = now, True

    def drain(self, fd: int) -> None:
        """Read what is waiting, a batch at most, writing what falls due in between."""
        lane = self.lane
        waited = monotonic_ns() - self.empty_at
        for _ in range(_BATCH):
            # Stamped before the read: the packet was there already, and copying it is not part of its delay.
            now = monotonic_ns()
            try:
                data = os.read(fd, READ_BYTES)
            except BlockingIOError:
                self.empty(now)
                return
            if waited > LATE_NS:
                lane.lateness.add(waited)
            lane.arrive(data, now)
            lane.emit(now, monotonic_ns)
        self.is_empty = False


def run(lanes: dict[int, Lane], control: Control, load: Load) -> None:
    """Carry packets until the control socket closes. `lanes` maps the descriptor to read from to its lane.

    Raises OSError when a device is gone (its router's namespace ended): there is nothing left to wait for.
    """
    control_fd = control.fileno()
    descriptors = [*lanes, control_fd]
    both = tuple(lanes.values())
    intakes = {fd: Intake(lane, monotonic_ns()) for fd, lane in lanes.items()}
    run_queue = RunQueue()
    early_for = 0  # the deadline for which the loop wakes early and polls
    while True:
        now = monotonic_ns()
        deadline = FOREVER
        for lane in both:
            due = lane.emit(now, monotonic_ns)
            if due < deadline:
                deadline = due
        before = monotonic_ns()
        wait = deadline - before
        if wait > _HEARTBEAT_NS + _PAUSE_NS:
            wait = _HEARTBEAT_NS
        elif wait > _PAUSE_NS or deadline == early_for:
            early_for = deadline
            wait -= _EARLY_NS
        starved = run_queue.waited_ns() if wait > LATE_NS else -1
        readable, _, _ = select(descriptors, (), (), max(0, wait) / 1e9)
        now = monotonic_ns()
        if load.waited(before, now):
            for lane in both:
                lane.lateness.judge(now, time())
        for fd, intake in intakes.items():
            if fd not in readable:
                intake.empty(now)
            elif intake.is_empty and now - before > _SLEPT_NS:
                # It came during this wait, and was read at once but for what the wait took too long.
                late = now - before - max(0, wait)
                if starved >= 0 and now - before > LATE_NS:
                    late = max(late, run_queue.waited_ns() - starved)
                intake.empty(now - max(0, late))
        for fd in readable:
            if fd == control_fd:
                if not control.answer():
                    return
            else:
                intakes[fd].drain(fd)
