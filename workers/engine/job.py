"""A computation of a sequence as a handle: whoever began it stops it, and nothing else of the sequence.

Owns the tokens on their way to who waits for them, and the table of the jobs under way. Steps are the runner's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager
from typing import Self

import torch

from workers.engine.sequence import Generated, Sequence
from workers.engine.speculation import Drafter

log = logging.getLogger(__name__)


class Stopped(Exception):
    """The sequence was freed, or the engine closed, before the awaited token was there."""


class SequenceFailed(Exception):
    """One sequence cannot be computed, and could not elsewhere: the others of its step are not concerned."""


class EngineFailed(Exception):
    """The engine computes nothing at all: what it was asked for may well be computed elsewhere."""


class Job:
    """A sequence being computed: an iterator over its tokens. It ends by itself, by `stop`, or raising what went wrong.

    `once`: one token and over. `on_step` is called when `computed` has moved on.
    """

    def __init__(
        self,
        sequence: Sequence,
        once: bool,
        on_stop: Callable[[Job], None],
        on_step: Callable[[], None] | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.sequence = sequence
        self.once = once
        self.on_step = on_step
        self.drafter = drafter
        self.since_ns = time.monotonic_ns()
        self.closed = False
        """No further token will come."""
        self._on_stop = on_stop
        self._queue: asyncio.Queue[Generated | Exception | None] = asyncio.Queue()
        self._taken = False

    def stop(self) -> None:
        """Compute no further step. A token of the one in flight is still delivered; then the iteration ends."""
        if not self.closed:
            self._on_stop(self)

    def deliver(self, generated: Generated) -> None:
        """A token for whoever iterates, who need not keep up."""
        if not self.closed:
            self._queue.put_nowait(generated)

    def close(self, error: Exception | None = None) -> None:
        """The iteration ends after what was delivered, with `error` if there is one. The first call counts."""
        if not self.closed:
            self.closed = True
            self._queue.put_nowait(error)

    def note_draft(self, drafted: int, accepted: int) -> None:
        """Note how many tokens of the sequence's last step were guessed, and how many of these held."""
        assert self.drafter is not None
        self.drafter.learn(drafted, accepted)
        self.sequence.drafted += drafted
        self.sequence.accepted += accepted

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Generated:
        if self._taken:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, Generated):
            return item
        self._taken = True
        if item is None:
            raise StopAsyncIteration
        raise item


class Jobs:
    """The jobs under way, at most one of a sequence, oldest first; and those that the step in flight computes."""

    def __init__(self) -> None:
        self._of: dict[Sequence, Job] = {}
        self._flying: list[Job] = []
        self._landed: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._of.values()))

    def __getitem__(self, sequence: Sequence) -> Job:
        return self._of[sequence]

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._of

    def begin(
        self, sequence: Sequence, once: bool, on_step: Callable[[], None] | None = None, drafter: Drafter | None = None
    ) -> Job:
        """A job of a sequence that has none and is not in flight."""
        job = self._of[sequence] = Job(sequence, once, self.stop, on_step, drafter)
        return job

    def is_under_way(self, job: Job) -> bool:
        """Whether the next step may compute it."""
        return self._of.get(job.sequence) is job

    def stop(self, job: Job) -> None:
        """End one job. If a step is computing it, that ends it: its token is still to be delivered."""
        self._drop(job)
        if job not in self._flying:
            job.close()

    def finish(self, job: Job, error: Exception | None = None) -> None:
        """End one job now."""
        self._drop(job)
        job.close(error)

    def fail(self, job: Job, error: Exception) -> None:
        """End one job with an error; nothing of its sequence is used any more, and no other job is concerned."""
        job.sequence.spoilt = True
        if _for_want_of_memory(error):
            error = EngineFailed(f"no memory to compute in: {error}")
        if not isinstance(error, EngineFailed):
            log.error('sequence "%s" cannot be computed', job.sequence.id, exc_info=error)
            failure = SequenceFailed(f"the request cannot be computed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            error = failure
        self.finish(job, error)

    def is_flying(self, sequence: Sequence) -> bool:
        """Whether the step in flight computes the sequence."""
        return any(job.sequence is sequence for job in self._flying)

    async def landed(self, sequence: Sequence) -> None:
        """Return when no step in flight computes the sequence."""
        while self.is_flying(sequence):
            assert self._landed is not None
            await asyncio.shield(self._landed)

    @contextmanager
    def flight(self, jobs: List[Job]) -> Iterator[None]:
        """A step that computes `jobs`. Those that were stopped meanwhile are closed at its end."""
        self._flying, self._landed = list(jobs), asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            self._flying = []
            self._landed.set_result(None)
            for job in jobs:
                if not self.is_under_way(job):
                    job.close()

    def _drop(self, job: Job) -> None:
        if self.is_under_way(job):
            del self._of[job.sequence]


def _for_want_of_memory(error: Exception) -> bool:
    """Another machine may have it."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
