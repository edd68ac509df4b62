"""State of a simulation: workers, their caches, connection pools, requests on their way. `simulator` has the rules."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from experiments.sim.handover import Relay
from experiments.sim.outcome import Outcome
from workers.cache.policy import PrefixPolicy
from workers.policy import Route


class SimCache:
    """Counts in tokens, a last block in part as a whole one: a prompt's own length is the caller's to mind."""

    def __init__(self, block_tokens: int, most_tokens: int = 0) -> None:
        self._policy = PrefixPolicy()
        self._block_tokens = block_tokens
        self._most_blocks = most_tokens // block_tokens if most_tokens else None

    def matched(self, path: Sequence[int]) -> int:
        """Tokens of the prompt's beginning that are here. Changes nothing."""
        return self._policy.match(path) * self._block_tokens

    @property
    def tokens(self) -> int:
        """All that is here."""
        return self._policy.size * self._block_tokens

    def keep(self, path: Sequence[int]) -> None:
        """The whole prompt is here and used now."""
        if path:
            self._policy.insert(path)
        if self._most_blocks is not None and self._policy.size > self._most_blocks:
            self._policy.evict(self._policy.size - self._most_blocks)


T = TypeVar("T")


class Pool(Generic[T]):
    """Pool of connections: who asks has one at once, or is returned by a later `release`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.busy = 0
        self._waiting: deque[T] = deque()

    def ask(self, who: T) -> bool:
        """Take a connection: true when there is one now; else `who` waits."""
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


@dataclass(eq=False)
class Node:
    """A worker. `queue`: prefills, the first of them under way; `active`: requests not settled on it."""

    name: str
    role: str
    cache: SimCache
    queue: "deque[Live]" = field(default_factory=lambda: deque())
    active: int = 0
    relaying: int = 0


@dataclass(eq=False)
class Live:
    """A request on its way. `path`: its prompt's full blocks."""

    outcome: Outcome
    path: Sequence[int]
    route: Route
    unsettled: set[str] = field(default_factory=set)
    queued_s: float = 0.0
    prefill_end_s: float = 0.0
    asked_s: float | None = None  # when it wanted a connection
    holds_connection: bool = False
    main_has_kv: bool = False
    relay: Relay | None = None
    relay_free: bool = False  # it ended there, or main decode goes on
    dropped: bool = False  # it ended on the relay, and main decode shall not have its KV
