"""Load of the emulator's process, and its waiting for a CPU. Owns what /proc says of this process."""

import os

_WINDOW_NS = 1_000_000_000


class Load:
    """Load of the process: the share of wall time not spent waiting, over windows of one second.

    While `measuring`, `pddbed verify` loads the link as much as it may be loaded; that is counted apart.
    """

    def __init__(self, now: int) -> None:
        self._window_start = now
        self._waited_ns = 0
        self.measuring = False
        self.busy_last = 0.0
        self.busy_max = 0.0
        self.busy_max_measuring = 0.0

    def waited(self, before: int, now: int) -> bool:
        """A wait is over; True when it was a window's last."""
        self._waited_ns += now - before
        if now - self._window_start < _WINDOW_NS:
            return False
        self._end_window(now)
        return True

    def measure(self, measuring: bool, now: int) -> None:
        """From `now` on the link is loaded by `pddbed verify`, or no longer."""
        self._end_window(now)
        self.measuring = measuring

    def _end_window(self, now: int) -> None:
        elapsed = now - self._window_start
        if elapsed >= _WINDOW_NS // 4:  # a shorter one tells nothing
            self.busy_last = 1.0 - self._waited_ns / elapsed
            if self.measuring:
                self.busy_max_measuring = max(self.busy_max_measuring, self.busy_last)
            else:
                self.busy_max = max(self.busy_max, self.busy_last)
        self._window_start, self._waited_ns = now, 0

    def forget(self) -> None:
        """Forget what was busiest so far."""
        self.busy_max = self.busy_max_measuring = 0.0


class RunQueue:
    """Time that this process waited for a CPU in its whole life, in ns; 0 where it does not say."""

    def __init__(self) -> None:
        try:
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def waited_ns(self) -> int:
        try:
            return int(os.pread(self._fd, 100, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return 0
