"""Routes: the cheapest, the same both ways, and free of loops when every router forwards on its own."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from testbed.model.impairment import Impairment
from testbed.model.plan import RoutePlan, WanPlan
from testbed.topology.addresses import wan_addresses
from testbed.topology.routes import routes

MS = 1_000_000


def link(index: int, a: str, b: str, cost: int = 1, **keys: int) -> WanPlan:
    ends = wan_addresses(index)
    forward = Impairment(rate_bps=keys.get("forward"), delay_ns=MS)
    backward = Impairment(rate_bps=keys.get("backward"), delay_ns=2 * MS)
    return WanPlan(f"wan{index}", a, b, *ends, forward, backward, mtu=keys.get("mtu", 1500), cost=cost)


def between(found: Sequence[RoutePlan], source: str, destination: str) -> RoutePlan:
    return next(r for r in found if (r.datacenter, r.destination) == (source, destination))


def test_the_cheapest_path_wins_over_the_shortest() -> None:
    found = routes("abc", [link(0, "a", "c", cost=3), link(1, "a", "b"), link(2, "b", "c")])
    assert between(found, "a", "c").links == ("wan1", "wan2")
    assert between(found, "c", "a").links == ("wan2", "wan1")


def test_among_equally_cheap_paths_the_one_with_fewer_links_wins_then_the_earlier_link() -> None:
    found = routes("abc", [link(0, "a", "b"), link(1, "b", "c"), link(2, "a", "c", cost=2), link(3, "a", "c", cost=2)])
    assert between(found, "a", "c").links == ("wan2",)


def test_a_route_sums_delays_and_takes_the_slowest_rate_of_its_own_direction() -> None:
    wans = [link(0, "a", "b", forward=100, backward=7), link(1, "c", "b", forward=5, backward=50, mtu=1400)]
    found = routes("abc", wans)
    there, back = between(found, "a", "c"), between(found, "c", "a")
    assert (there.rtt_ns, there.rate_bps, there.mtu) == (6 * MS, 50, 1400)
    assert (back.rtt_ns, back.rate_bps, back.mtu) == (6 * MS, 5, 1400)


def test_a_path_without_any_limit_has_none() -> None:
    assert between(routes("ab", [link(0, "a", "b")]), "a", "b").rate_bps is None


def test_datacenters_without_a_path_have_no_route() -> None:
    assert routes("abc", [link(0, "a", "b")]) == routes("ab", [link(0, "a", "b")])


NAMES = "abcdefg"
EDGES = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES), st.integers(1, 4)).filter(lambda e: e[0] != e[1]),
    max_size=14,
)


@given(EDGES)
def test_forwarding_hop_by_hop_follows_every_route_and_the_way_back_is_the_way_there(
    edges: list[tuple[str, str, int]],
) -> None:
    wans = [link(index, a, b, cost) for index, (a, b, cost) in enumerate(edges)]
    by_name = {wan.name: wan for wan in wans}
    found = routes(NAMES, wans)
    table = {(route.datacenter, route.destination): route for route in found}
    for route in found:
        assert table[route.destination, route.datacenter].links == route.links[::-1]
        at, walked = route.datacenter, []
        while at != route.destination:
            wan = by_name[table[at, route.destination].links[0]]
            walked.append(wan.name)
            assert len(walked) <= len(NAMES), "a loop"
            at = wan.b if at == wan.a else wan.a
        assert tuple(walked) == route.links


@given(EDGES)
def test_no_route_is_dearer_than_any_other_path(edges: list[tuple[str, str, int]]) -> None:
    wans = [link(index, a, b, cost) for index, (a, b, cost) in enumerate(edges)]
    cost = {wan.name: wan.cost for wan in wans}
    infinite = 10**9
    least = {(a, b): 0 if a == b else infinite for a in NAMES for b in NAMES}
    for wan in wans:
        for pair in ((wan.a, wan.b), (wan.b, wan.a)):
            least[pair] = min(least[pair], wan.cost)
    for k in NAMES:  # Floyd-Warshall, as an independent answer
        for a in NAMES:
            for b in NAMES:
                least[a, b] = min(least[a, b], least[a, k] + least[k, b])
    found = {(r.datacenter, r.destination): sum(cost[name] for name in r.links) for r in routes(NAMES, wans)}
    assert found == {pair: value for pair, value in least.items() if pair[0] != pair[1] and value < infinite}
