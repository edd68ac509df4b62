"""Routes between datacenters: the cheapest path over the WAN links. Pure.

Border routers forward hop by hop, so the paths must agree with each other: the way back is the way there, and
every part of a path is the path between its ends. Among equally cheap paths the one with fewer links wins, then a
fixed preference between links; with that, the cheapest path is unique.
"""

import heapq
from collections.abc import Mapping, Sequence

from testbed.model.plan import RoutePlan, WanPlan

# Total cost, number of links, and a sum of 2^index that no other set of links has.
Weight = tuple[int, int, int]


def routes(datacenters: Sequence[str], wans: Sequence[WanPlan]) -> tuple[RoutePlan, ...]:
    """A route for every ordered pair of datacenters that are connected, in the order of the file."""
    links: dict[str, list[tuple[int, WanPlan]]] = {name: [] for name in datacenters}
    for index, wan in enumerate(wans):
        links[wan.a].append((index, wan))
        links[wan.b].append((index, wan))
    found: list[RoutePlan] = []
    for source in datacenters:
        paths = _paths_from(source, links)
        found += [_route(source, name, paths[name]) for name in datacenters if name != source and name in paths]
    return tuple(found)


def _paths_from(source: str, links: Mapping[str, Sequence[tuple[int, WanPlan]]]) -> dict[str, tuple[WanPlan, ...]]:
    """Dijkstra's algorithm: the way to every datacenter that can be reached. `links`: (index, link) at each."""
    paths: dict[str, tuple[WanPlan, ...]] = {}
    queue: list[tuple[Weight, str, str, WanPlan | None]] = [((0, 0, 0), source, source, None)]
    while queue:
        weight, name, before, by = heapq.heappop(queue)  # weights differ, so nothing after them is compared
        if name in paths:
            continue
        paths[name] = (*paths[before], by) if by is not None else ()
        for index, wan in links[name]:
            other = wan.b if name == wan.a else wan.a
            if other not in paths:
                further = (weight[0] + wan.cost, weight[1] + 1, weight[2] + (1 << index))
                heapq.heappush(queue, (further, other, name, wan))
    return paths


def _route(source: str, destination: str, links: Sequence[WanPlan]) -> RoutePlan:
    rates = []
    at = source
    for wan in links:
        forward = at == wan.a
        rates.append((wan.forward if forward else wan.backward).rate_bps)
        at = wan.b if forward else wan.a
    limited = [rate for rate in rates if rate is not None]
    return RoutePlan(
        datacenter=source,
        destination=destination,
        links=tuple(wan.name for wan in links),
        rtt_ns=sum(wan.rtt_ns for wan in links),
        rate_bps=min(limited, default=None),
        mtu=min(wan.mtu for wan in links),
    )
