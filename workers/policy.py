"""Which workers serve a request, and by which pipeline. Pure: no clocks, no sockets; shared with the simulator."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class NoRoute(Exception):
    """No set of connected workers can serve the request; the sentence says which is missing."""

    name = "no_worker"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What routing knows of a worker. `connected`: the peers to which its own warm connections are up."""

    name: str
    role: str
    active: int
    connected: frozenset[str]


@dataclass(frozen=True, slots=True)
class Route:
    """The workers of one request. `reason` goes to its record."""

    pipeline: str  # "p-rld-md" | "p-md" | "p-rld" | "p"
    prefill: str
    relay: str | None
    main: str | None
    reason: str

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(name for name in (self.prefill, self.relay, self.main) if name is not None)


def pipeline_for(policy: str, hit_rate: float, relay_threshold: float) -> tuple[str, str]:
    """The pipeline a policy takes for a request with `hit_rate` (0..1) of main decode's cache, and why."""
    if policy == "pdd":
        if hit_rate > relay_threshold:
            return "p-md", f"hit rate {hit_rate:.1%} is above {relay_threshold:.1%}"
        return "p-rld-md", f"hit rate {hit_rate:.1%} is not above {relay_threshold:.1%}"
    return {"cdc-pd": "p-md", "idc-pd": "p-rld", "single": "p"}[policy], f"policy {policy}"


def choose_route(pipeline: str, reason: str, workers: Iterable[WorkerView]) -> Route:
    """The least busy worker of each role the pipeline needs, ties by name; prefill must reach the others.

    Raises NoRoute.
    """
    views = list(workers)
    prefills = _by_load(views, "prefill")
    if not prefills:
        raise NoRoute("no prefill worker is connected to the gateway")
    problem = ""
    for prefill in prefills:
        relay = main = None
        reachable = prefill.connected
        if "rld" in pipeline:
            relay = _first(_by_load(views, "relay-decode"), reachable)
            if relay is None:
                problem = f"{prefill.name} reaches no relay-decode worker that is connected to the gateway"
                continue
            reachable &= relay.connected  # main decode gets token ids from the relay
        if "md" in pipeline:
            main = _first(_by_load(views, "main-decode"), reachable)
            if main is None:
                senders = prefill.name if relay is None else f"{prefill.name} and {relay.name}"
                problem = f"{senders} reach no main-decode worker that is connected to the gateway"
                continue
        return Route(pipeline, prefill.name, relay.name if relay else None, main.name if main else None, reason)
    raise NoRoute(problem)


def _by_load(views: Sequence[WorkerView], role: str) -> list[WorkerView]:
    return sorted((view for view in views if view.role == role), key=lambda view: (view.active, view.name))


def _first(candidates: Sequence[WorkerView], reachable: frozenset[str]) -> WorkerView | None:
    return next((view for view in candidates if view.name in reachable), None)
