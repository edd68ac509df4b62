"""How long each part of a run took, as a table at its end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Times:
    """Parts in the order in which they ended, each in seconds."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, float]] = []

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Time the block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.parts.append((part, time.monotonic() - began))

    def print(self) -> None:
        for part, seconds in self.parts:
            print(f"  {part:<44} {seconds:7.1f} s")
        print(f"  {'in all':<44} {sum(seconds for _, seconds in self.parts):7.1f} s", flush=True)
