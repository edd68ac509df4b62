"""The connection pool between two nodes: so many connections, lent first come first served. Pure, without a clock."""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Pool(Generic[T]):
    """Who asks has a connection at once, or is returned by a later `release`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.busy = 0
        self._waiting: deque[T] = deque()

    def ask(self, who: T) -> bool:
        """Whether there is a connection now; else `who` waits."""
        if self.busy < self.size:
            self.busy += 1
            return True
        self._waiting.append(who)
        return False

    def release(self) -> T | None:
        """A connection is given back; whoever waited longest has it now."""
        if self._waiting:
            return self._waiting.popleft()
        self.busy -= 1
        return None

    def leave(self, who: T) -> bool:
        """Wait no longer; whether `who` did."""
        if who not in self._waiting:
            return False
        self._waiting.remove(who)
        return True
