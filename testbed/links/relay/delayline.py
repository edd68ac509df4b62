"""The delay line of one direction: frames wait here until their logical departure time. No I/O, no clock.

Order is kept whatever the caller does: a frame never leaves before one that was pushed earlier.
"""

from collections import deque

from testbed.links.relay.bottleneck import FOREVER
from testbed.links.relay.packet import Frame

# What Python keeps for a frame beside its bytes: the objects' headers, the entry, the time.
OVERHEAD_BYTES = 200


class DelayLine:
    """`head` is the departure time of the first frame, FOREVER when empty."""

    __slots__ = ("_entries", "_latest", "held_bytes", "limit_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self._entries: deque[tuple[int, Frame, int]] = deque()
        self._latest = 0
        self.limit_bytes = limit_bytes  # of memory
        self.held_bytes = 0

    @property
    def head(self) -> int:
        return self._entries[0][0] if self._entries else FOREVER

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, at: int, frame: Frame, frame_bytes: int) -> bool:
        """Keep `frame` until `at`; False when the line holds as much memory as it may."""
        size = frame_bytes + OVERHEAD_BYTES
        if self.held_bytes + size > self.limit_bytes:
            return False
        if at < self._latest:
            at = self._latest
        else:
            self._latest = at
        self.held_bytes += size
        self._entries.append((at, frame, size))
        return True

    def pop(self) -> tuple[int, Frame]:
        """The first frame and its departure time."""
        at, frame, size = self._entries.popleft()
        self.held_bytes -= size
        return at, frame
