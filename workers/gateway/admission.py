"""Admission of requests: how many run at once, how many may wait for it, draining. Knows no HTTP and no workers.

A queue without a bound turns an overload into answers that nobody waits for any more, and into memory; so what does not
fit is refused at once, with a guess of when it would.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

RECENT = 32  # ends of requests from which their pace is taken
RETRY_AFTER_S = (1, 60)
WAIT_S = 600.0  # for one's turn; clients have given up by then


@dataclass(frozen=True)
class Limits:
    """`max_running`: requests with the workers; `max_waiting`: requests that wait in the gateway for one to end."""

    max_running: int = 256
    max_waiting: int = 1024


class Overloaded(Exception):
    """No further request may wait; `retry_after_s` is when, at the present pace, there is room again."""

    name = "overloaded"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


_STOPPED = "the gateway is shutting down"


class Draining(Overloaded):
    """The gateway finishes what it has begun and takes nothing new."""

    name = "draining"


class WaitedTooLong(Overloaded):
    """A place among those that wait, and no turn within WAIT_S."""

    name = "queue_deadline"


class Ticket:
    """One request's place: waiting, then running, then given back. `release` whatever happened; it is idempotent."""

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission
        self._turn = asyncio.Event()
        self._released = False
        self._abandoned = False
        self.running = False
        self.on_abandon: Callable[[], None] = lambda: None
        """Called when the gateway will wait no longer for this running request."""

    async def admitted(self) -> None:
        """Wait for one's turn. Raises Draining when it will not come, WaitedTooLong after WAIT_S."""
        if not self._turn.is_set():
            try:
                async with asyncio.timeout(WAIT_S):
                    await self._turn.wait()
            except TimeoutError:
                raise WaitedTooLong(
                    f"no other request ended within {WAIT_S:.0f} s to make room for this one", RETRY_AFTER_S[1]
                ) from None
        if self._abandoned:
            raise Draining(_STOPPED, RETRY_AFTER_S[0])

    def admit(self) -> None:
        """Called by the admission."""
        self.running = True
        self._turn.set()

    def abandon(self) -> None:
        """Called by the admission."""
        self._abandoned = True
        self._turn.set()
        if self.running:
            self.on_abandon()

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._admission.released(self)


class Admission:
    """First come, first served."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._running: set[Ticket] = set()
        self.refused = 0
        self.draining = False
        self._waiting: deque[Ticket] = deque()
        self._ends: deque[float] = deque(maxlen=RECENT)
        self._clock = clock
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter(self, count: int = 1) -> list[Ticket]:
        """Places for `count` requests, all or none. Raises Overloaded, Draining."""
        if self.draining:
            self.refused += count
            raise Draining(f"{_STOPPED} and takes no new requests", RETRY_AFTER_S[0])
        free = max(0, self.limits.max_running - self.running) if not self._waiting else 0
        too_many = len(self._waiting) + count - free - self.limits.max_waiting
        if too_many > 0:
            self.refused += count
            raise Overloaded(
                f"{self.running} requests are running and {self.waiting} are waiting, of at most "
                f"{self.limits.max_running} and {self.limits.max_waiting}; try again later",
                self.retry_after_s(too_many),
            )
        tickets = [Ticket(self) for _ in range(count)]
        self._waiting.extend(tickets)
        self._idle.clear()
        self._admit()
        return tickets

    def retry_after_s(self, places: int) -> int:
        """Seconds until so many requests will have ended, at the pace of the latest ones."""
        low, high = RETRY_AFTER_S
        if len(self._ends) < 2:
            return low
        each_s = (self._clock() - self._ends[0]) / len(self._ends)
        return min(high, max(low, math.ceil(places * each_s)))

    def drain(self) -> None:
        """Take nothing new; what has a ticket keeps it."""
        self.draining = True

    async def idle(self) -> None:
        """Wait until no request has a ticket."""
        await self._idle.wait()

    def abandon(self) -> None:
        """Wait no longer: neither for those that run nor for those that wait to."""
        for ticket in [*self._running, *self._waiting]:
            ticket.abandon()

    def released(self, ticket: Ticket) -> None:
        """Called by tickets."""
        if ticket in self._running:
            self._running.remove(ticket)
            self._ends.append(self._clock())
        else:
            self._waiting.remove(ticket)
        self._admit()
        if not self._running and not self._waiting:
            self._idle.set()

    def _admit(self) -> None:
        while self._waiting and self.running < self.limits.max_running:
            ticket = self._waiting.popleft()
            self._running.add(ticket)
            ticket.admit()
