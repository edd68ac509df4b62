"""The choice of workers for a request, and of the pipeline. Pure: no clocks, no sockets; shared with the simulator."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

OFFLOAD_THRESHOLD = 512
"""The default of `prfaas`: uncached tokens up to which a decode worker prefills a prompt itself."""
BUSY_TOKENS = 256
"""By default: a request that a worker has weighs as much as so many tokens of a prompt that it lacks."""

FALLBACKS = {"pdd": ("p-md", "p-rld")}
"""By policy, the pipelines to take when one of its own lacks a worker, best first; then one worker alone."""
ALONE = {"main-decode": "md", "relay-decode": "rld", "prefill": "p"}
"""By role, best first, the pipeline that is one worker of that role alone."""


class NoRoute(Exception):
    """No set of connected workers can serve the request; the sentence says which is missing."""

    name = "no_worker"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker, as routing knows it. `connected`: the peers to which its own warm connections are up.

    `matched`: tokens of the request's prompt whose KV its cache holds; `busy_tokens`: how many of them each of the
    `active` requests that it has weighs. `cached`: tokens that its cache holds in all.
    """

    name: str
    role: str
    active: int
    connected: frozenset[str]
    matched: int = 0
    busy_tokens: int = BUSY_TOKENS
    cached: int = 0
    datacenter: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """The workers of one request. `reason` goes to its record."""

    pipeline: str  # "p-rld-md" | "p-md" | "p-rld", or one worker alone: "p" | "rld" | "md"
    prefill: str  # who prefills: a worker of another role when it serves alone
    relay: str | None
    main: str | None
    reason: str
    hit_rate: float = 0.0
    """The share of the prompt that main decode's cache held when the route was chosen."""

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(name for name in (self.prefill, self.relay, self.main) if name is not None)


def pipeline_for(policy: str, hit_rate: float, relay_threshold: float) -> tuple[str, str]:
    """The pipeline a policy takes for a request with `hit_rate` (0..1) of main decode's cache, and why."""
    if policy == "pdd":
        if hit_rate > relay_threshold:
            return "p-md", f"hit rate {hit_rate:.1%} is above {relay_threshold:.1%}"
        return "p-rld-md", f"hit rate {hit_rate:.1%} is not above {relay_threshold:.1%}"
    return {"cdc-pd": "p-md", "prfaas": "p-md", "idc-pd": "p-rld", "single": "p"}[policy], f"policy {policy}"


def route_for(
    policy: str,
    relay_threshold: float,
    prompt_tokens: int,
    workers: Iterable[WorkerView],
    offload_threshold: int = OFFLOAD_THRESHOLD,
) -> Route:
    """The pipeline and the workers of a request. Raises NoRoute.

    For `pdd` main decode comes first, by cache and load; what its cache holds then decides whether a relay is needed.
    So it does for `prfaas`, where it decides who prefills.
    """
    views = list(workers)
    if policy == "prfaas" and prompt_tokens:
        return prfaas_route(prompt_tokens, offload_threshold, views)
    if policy == "pdd" and prompt_tokens:
        rate = _hit_rate(choose_route("p-md", "", views), prompt_tokens, views)
        route = choose_route(*pipeline_for(policy, rate, relay_threshold), views)
    else:
        route = choose_route(*pipeline_for(policy, 0.0, relay_threshold), views)
    return replace(route, hit_rate=_hit_rate(route, prompt_tokens, views))


def prfaas_route(prompt_tokens: int, offload_threshold: int, workers: Iterable[WorkerView]) -> Route:
    """Prefill as a service (arXiv 2604.15039): only long uncached prompts are worth prefilling elsewhere.

    The uncached length counts, not the prompt's: of the main decode that would be taken alone, by cache and load. Up to
    `offload_threshold` tokens it prefills and decodes by itself and nothing crosses the WAN; above, prefill computes
    and its KV crosses. The paper's threshold balances the throughput of both clusters and of the link (19.4 K tokens in
    its case study), and is to be chosen for a deployment. Raises NoRoute.
    """
    views = list(workers)
    local = alone_route(("main-decode",), "", views)
    matched = next(view.matched for view in views if view.name == local.prefill)
    uncached = prompt_tokens - matched
    if uncached > offload_threshold:
        reason = f"{uncached} uncached tokens are above {offload_threshold}"
        route = choose_route("p-md", reason, views)
        return replace(route, hit_rate=_hit_rate(route, prompt_tokens, views))
    reason = f"{uncached} uncached tokens are not above {offload_threshold}: prefilled where they are decoded"
    return replace(local, reason=reason, hit_rate=matched / prompt_tokens)


def route_around(
    policy: str,
    relay_threshold: float,
    prompt_tokens: int,
    workers: Iterable[WorkerView],
    offload_threshold: int = OFFLOAD_THRESHOLD,
) -> Route:
    """`route_for`, and when workers are missing the best of what is left; its reason says what is missing.

    Without main decode the relay answers to the end, without a relay main decode answers from the first token on, and
    in the end any worker serves alone. Raises NoRoute when none is connected.
    """
    views = list(workers)
    try:
        return route_for(policy, relay_threshold, prompt_tokens, views, offload_threshold)
    except NoRoute as missing:
        reason = str(missing)
    for pipeline in FALLBACKS.get(policy, ()):
        try:
            route = choose_route(pipeline, reason, views)
        except NoRoute:
            continue
        return replace(route, hit_rate=_hit_rate(route, prompt_tokens, views))
    return alone_route(ALONE, reason, views)


def alone_route(roles: Iterable[str], reason: str, workers: Iterable[WorkerView]) -> Route:
    """One worker, of one of `roles`, prefills and decodes: the one that holds most of the prompt and is not too busy;
    of equal ones that of the first role. Raises NoRoute.
    """
    order = list(roles)
    candidates = [view for view in workers if view.role in order]
    if not candidates:
        raise NoRoute(f"{reason or 'no ' + order[0] + ' worker is connected'}; nor is one that could serve alone")
    best = min(candidates, key=lambda view: (_cost(view)[:2], order.index(view.role), view.name))
    return Route(ALONE[best.role], best.name, None, None, reason)


def _hit_rate(route: Route, prompt_tokens: int, views: Sequence[WorkerView]) -> float:
    matched = next((view.matched for view in views if view.name == route.main), 0)
    return matched / prompt_tokens if prompt_tokens else 0.0


def choose_route(pipeline: str, reason: str, workers: Iterable[WorkerView]) -> Route:
    """For each role that the pipeline needs, the worker that holds most of the prompt, unless it is busier by more than
    that is worth (`busy_tokens`), of equals the one that caches less, then by name; prefill must reach the others, and
    its relay is one of its own datacenter.

    Raises NoRoute.
    """
    views = list(workers)
    prefills = _by_cost(views, "prefill")
    if not prefills:
        raise NoRoute("no prefill worker is connected to the gateway")
    problem = ""
    for prefill in prefills:
        relay = main = None
        reachable = prefill.connected
        if "rld" in pipeline:
            beside = [view for view in views if view.datacenter == prefill.datacenter]
            relay = _first(_by_cost(beside, "relay-decode"), reachable)
            if relay is None:
                where = f" of its datacenter {prefill.datacenter}" if prefill.datacenter else ""
                problem = f"{prefill.name} reaches no relay-decode worker{where} that is connected to the gateway"
                continue
            reachable &= relay.connected  # main decode gets token ids from the relay
        if "md" in pipeline:
            main = _first(_by_cost(views, "main-decode"), reachable)
            if main is None:
                senders = prefill.name if relay is None else f"{prefill.name} and {relay.name}"
                problem = f"{senders} reach no main-decode worker that is connected to the gateway"
                continue
        return Route(pipeline, prefill.name, relay.name if relay else None, main.name if main else None, reason)
    raise NoRoute(problem)


def _by_cost(views: Sequence[WorkerView], role: str) -> list[WorkerView]:
    return sorted((view for view in views if view.role == role), key=_cost)


def _cost(view: WorkerView) -> tuple[int, int, int, str]:
    # of equals the emptier one: a session stays where it begins, so the first idle worker would get all of them
    return view.busy_tokens * view.active - view.matched, view.active, view.cached, view.name


def _first(candidates: Sequence[WorkerView], reachable: frozenset[str]) -> WorkerView | None:
    return next((view for view in candidates if view.name in reachable), None)
