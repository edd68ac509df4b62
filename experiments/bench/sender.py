"""Sender of a load: each request on time, and what came of it. Owns the schedule and the cap, not the sockets."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol

from experiments.bench.load import Planned
from experiments.bench.outcome import Outcome

LEAD_NS = 50_000_000  # before the first request, so that it is not late


class Observer(Protocol):
    """Listener to how far the run is."""

    def started(self) -> None: ...

    def finished(self, outcome: Outcome) -> None: ...


@dataclass
class SendResult:
    """Result of a run. `under_way`: begun and given up when the run was stopped; `why` says by what, if it was."""

    begin_ns: int
    end_ns: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    under_way: int = 0
    not_sent: int = 0
    why: str = ""


class Sender:
    """`send` asks the server and fills the outcome; `still_there` is asked after a request that lost its connection."""

    def __init__(
        self,
        load: Sequence[Planned],
        send: Callable[[Planned, Outcome], Awaitable[None]],
        still_there: Callable[[Outcome], Awaitable[bool]],
        observer: Observer,
        concurrency: int | None = None,
    ) -> None:
        self._load = load
        self._send = send
        self._still_there = still_there
        self._observer = observer
        self._cap = None if concurrency is None else asyncio.Semaphore(concurrency)
        self._stopped = asyncio.Event()
        self._answered = {planned.after: asyncio.Event() for planned in load if planned.after is not None}
        self._result = SendResult(0)
        self._under_way = 0

    def stop(self, why: str) -> None:
        """Begin nothing more, and give up what is under way."""
        self._result.why = self._result.why or why
        self._stopped.set()

    async def run(self) -> SendResult:
        """Every request, or those that were done when the run was stopped."""
        result = self._result
        result.begin_ns = time.monotonic_ns() + LEAD_NS
        tasks: set[asyncio.Task[None]] = set()
        for planned in self._load:
            due_ns = result.begin_ns + (planned.due_ns or 0)
            if (wait_ns := due_ns - time.monotonic_ns()) > 0:
                await self._sleep(wait_ns / 1e9)
            if self._stopped.is_set():
                break
            tasks.add(asyncio.create_task(self._one(planned, due_ns)))
        stopped = asyncio.create_task(self._stopped.wait())
        everything = asyncio.create_task(_all(tasks))
        await asyncio.wait({stopped, everything}, return_when=asyncio.FIRST_COMPLETED)
        result.end_ns = time.monotonic_ns()
        for task in (stopped, *tasks):
            task.cancel()
        await everything  # what was given up; a bug of this program is no request's failure, and is raised
        result.under_way = self._under_way
        result.not_sent = len(self._load) - len(result.outcomes) - self._under_way
        result.outcomes.sort(key=lambda outcome: outcome.index)
        return result

    async def _sleep(self, seconds: float) -> None:
        """As long, or until the run is stopped."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            return

    async def _one(self, planned: Planned, due_ns: int) -> None:
        outcome = Outcome(
            planned.index, planned.request.input_tokens, planned.due_ns, asked_tokens=planned.request.output_tokens
        )
        woken_ns = time.monotonic_ns()
        async with AsyncExitStack() as stack:
            if planned.after is not None:
                await self._answered[planned.after].wait()
            if self._cap is not None:
                await stack.enter_async_context(self._cap)
            if planned.after is not None or self._cap is not None:
                outcome.held_ns = time.monotonic_ns() - woken_ns
            self._under_way += 1
            self._observer.started()
            await self._send(planned, outcome)
            self._under_way -= 1
        if planned.due_ns is not None:
            outcome.late_ns = max(0, outcome.start_ns - due_ns - outcome.held_ns)
        if planned.index in self._answered:
            self._answered[planned.index].set()
        self._result.outcomes.append(outcome)
        self._observer.finished(outcome)
        if not outcome.success and not self._stopped.is_set() and not await self._still_there(outcome):
            self.stop("gone")


async def _all(tasks: set[asyncio.Task[None]]) -> None:
    """Wait for all, and raise what one of them raised; being cancelled is no error."""
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
