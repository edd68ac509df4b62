"""What a simulation knows of a worker and of a request on its way. Plain state; the rules are `simulator`'s."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.sim.caches import SimCache
from experiments.sim.handover import Relay
from experiments.sim.outcome import Outcome
from workers.policy import Route


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
