"""The delay line of one direction: frames wait here until their logical departure time. No I/O, no clock.

Order is kept whatever the caller does: a frame never leaves before one that was pushed earlier, except
through `push_early`, which is what overtaking means.
"""

from collections import deque

from testbed.links.emulator.bottleneck import FOREVER
from testbed.links.emulator.packet import Frame

# What Python keeps for a frame beside its bytes: the objects' headers, the entry, the time.
OVERHEAD_BYTES = 200


class DelayLine:
    """`head` is the departure time of the first frame, FOREVER when empty."""

    __slots__ = ("_early", "_entries", "_latest", "head", "held_bytes", "limit_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self._entries: deque[tuple[int, Frame, int]] = deque()
        self._early: deque[tuple[int, Frame, int]] = deque()  # those that overtake, in their own order
        self._latest = 0
        self.head = FOREVER
        self.limit_bytes = limit_bytes  # of memory
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._entries) + len(self._early)

    def push(self, at: int, frame: Frame, frame_bytes: int) -> bool:
        """Keep `frame` until `at`; False when the line holds as much memory as it may."""
        size = frame_bytes + OVERHEAD_BYTES
        if self.held_bytes + size > self.limit_bytes:
            return False
        if at < self._latest:
            at = self._latest
        else:
            self._latest = at
        if at < self.head:
            self.head = at
        self.held_bytes += size
        self._entries.append((at, frame, size))
        return True

    def push_early(self, at: int, frame: Frame, frame_bytes: int) -> bool:
        """Like `push`, but this frame may leave before earlier ones. Rising `at` among such frames."""
        size = frame_bytes + OVERHEAD_BYTES
        if self.held_bytes + size > self.limit_bytes:
            return False
        if at < self.head:
            self.head = at
        self.held_bytes += size
        self._early.append((at, frame, size))
        return True

    def pop(self) -> tuple[int, Frame]:
        """The first frame and its departure time."""
        entries, early = self._entries, self._early
        at, frame, size = early.popleft() if early and early[0][0] == self.head else entries.popleft()
        self.held_bytes -= size
        self.head = entries[0][0] if entries else FOREVER
        if early and early[0][0] < self.head:
            self.head = early[0][0]
        return at, frame
