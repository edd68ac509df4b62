"""One computation of a sequence, as a handle: whoever began it stops it, and nothing else of the sequence.

Owns the tokens on their way to who waits for them. Steps are the runner's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Self

from workers.engine.sequence import Generated, Sequence
from workers.engine.speculation import Drafter


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
        """How many tokens of the sequence's last step were guessed, and how many of these held."""
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
