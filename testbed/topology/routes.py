"""How each datacenter reaches each other one: the cheapest path over the WAN links. Pure.

Border routers forward hop by hop, so the paths must agree with each other: the way back is the way there, and
every part of a path is the path between its ends. Among equally cheap paths the one with fewer links wins, then a
fixed preference between links; with that, the cheapest path is unique.
"""

import heapq
from collections.abc import Sequence

from testbed.topology.plan import RoutePlan, WanPlan

# Total cost, number of links, and a sum of 2^index that no other set of links has.
Weight = tuple[int, int, int]


def routes(datacenters: Sequence[str], wans: Sequence[WanPlan]) -> tuple[RoutePlan, ...]:
    """A route for every ordered pair of datacenters that are connected, in the order of the file."""
    found = []
    for source in datacenters:
        paths = _paths_from(source, wans)
        found += [_route(source, name, paths[name]) for name in datacenters if name != source and name in paths]
    return tuple(found)


def _paths_from(source: str, wans: Sequence[WanPlan]) -> dict[str, tuple[WanPlan, ...]]:
    """Dijkstra's algorithm: the links to every datacenter that can be reached."""
    done: dict[str, tuple[WanPlan, ...]] = {}
    queue: list[tuple[Weight, str, tuple[int, ...]]] = [((0, 0, 0), source, ())]
    while queue:
        weight, name, links = heapq.heappop(queue)
        if name in done:
            continue
        done[name] = tuple(wans[index] for index in links)
        for index, wan in enumerate(wans):
            if name in (wan.a, wan.b):
                other = wan.b if name == wan.a else wan.a
                further = (weight[0] + wan.cost, weight[1] + 1, weight[2] + (1 << index))
                heapq.heappush(queue, (further, other, (*links, index)))
    return done


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
