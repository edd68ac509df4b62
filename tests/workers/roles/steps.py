"""A worker whose engine computes one step for each that a test allows: hand-overs stopped at exactly one moment."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Steps:
    """The permits of one worker's engine. Only its compute thread waits for them, never the event loop."""

    def __init__(self, worker: Any) -> None:
        self._engine = worker.runner._engine
        self._compute = self._engine.compute
        self._permits = threading.Semaphore(0)
        self._free = False
        self.done = 0
        self._engine.compute = self._gated

    def _gated(self, batch: Any) -> Any:
        if not self._free:
            self._permits.acquire()
        self.done += 1
        return self._compute(batch)

    def allow(self, count: int) -> None:
        """So many more steps, the one in flight included."""
        self._permits.release(count)

    def free(self) -> None:
        """From now on as fast as it can."""
        self._free = True
        self._permits.release(1000)


@contextmanager
def steps(*workers: Any) -> Iterator[list[Steps]]:
    """Gates for some workers, open again at the end, so that their engines can stop."""
    gates = [Steps(worker) for worker in workers]
    try:
        yield gates
    finally:
        for gate in gates:
            gate.free()
