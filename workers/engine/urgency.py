"""Real-time priority for the moments in which a paced worker must not be late, where the kernel permits it.

A step that is due has to wake a thread, and that one the event loop. On a busy machine each waits some milliseconds
for its turn, behind whatever computes; with SCHED_FIFO it waits for nobody. Computing itself never has it: a machine
full of real-time work would stand still. Priorities are a thread's own (sched(7)).
"""

import os

PRIORITY = 1  # the lowest: an emulated link, which serves everybody, goes first


class Urgency:
    """Of the calling thread. Without permission (an ordinary user, a cgroup with a quota) nothing changes."""

    def __init__(self) -> None:
        self.permitted = True

    def begin(self) -> None:
        """Ahead of all that computes, from now on; threads made by this one are not."""
        self._set(os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, PRIORITY)

    def end(self) -> None:
        """As everybody."""
        self._set(os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, 0)

    def _set(self, policy: int, priority: int) -> None:
        if not self.permitted:
            return
        try:
            os.sched_setscheduler(0, policy, os.sched_param(priority))
        except OSError:
            self.permitted = False
