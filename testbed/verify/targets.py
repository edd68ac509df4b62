"""Targets of a verification: the ends of each link, the path of each host, the hosts of each fabric.

Everything on a request's way is to be measured, from host to host: a host's interface, its port, the router's inside.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from testbed.lab.endpoints import endpoints
from testbed.lab.network import Network
from testbed.lab.wan import WanControl
from testbed.model.direction import DIRECTIONS, Direction
from testbed.model.plan import LabPlan, WanPlan


class Targets:
    """Targets of one lab, as its links are asked to be now; plain values, for the measuring process."""

    def __init__(self, plan: LabPlan, network: Network, wan: WanControl) -> None:
        self._plan = plan
        self._network = network
        self._wan = wan

    def links(self, floor: Mapping[str, dict[str, float | None]]) -> list[dict[str, Any]]:
        """Each link, both ways, between a host of either side."""
        ways = [(wan.name, way) for wan in self._plan.wans for way in DIRECTIONS]
        jittered = sum(self._wan.asked(name, way).jitter is not None for name, way in ways)
        return [self._link(wan, jittered, floor) for wan in self._plan.wans]

    def fabrics(self) -> list[dict[str, Any]]:
        """Between the first two hosts of each datacenter, or its router and its only host."""
        found = []
        for datacenter in self._plan.datacenters:
            ends = [(host.name, host.address) for host in datacenter.hosts]
            ends.append((f"router.{datacenter.name}", datacenter.router_address))
            if len(ends) > 1:
                found.append(
                    {
                        "datacenter": datacenter.name,
                        "between": [name for name, _ in ends[:2]],
                        "ends": [
                            {"pid": self._network.pid_of(name), "address": str(address.ip)}
                            for name, address in ends[:2]
                        ],
                        "mtu": datacenter.fabric_mtu,
                        "rate_bps": datacenter.fabric_rate_bps,
                        "delay_ns": datacenter.fabric_delay_ns,
                    }
                )
        return found

    def _link(self, wan: WanPlan, jittered: int, floor: Mapping[str, dict[str, float | None]]) -> dict[str, Any]:
        between, ends = self._ends(wan)
        return {
            "name": wan.name,
            "between": between,
            "ends": ends,
            "mtu": wan.mtu,
            "driver": self._network.links[wan.name].driver,
            "directions": jittered,
            "asked": {way: self._wan.asked(wan.name, way).to_dict() for way in DIRECTIONS},
            "floor_ns": floor.get(wan.name, dict.fromkeys(DIRECTIONS)),
        }

    def _ends(self, wan: WanPlan) -> tuple[list[str], list[dict[str, Any]]]:
        """A host of either datacenter, so that everything on a request's way is measured; where their route is another
        one, or their fabric has limits of its own, ends of the link's own behind both routers."""
        hosts = [self._first_host(name) for name in (wan.a, wan.b)]
        direct = any(
            (route.datacenter, route.destination, route.links) == (wan.a, wan.b, (wan.name,))
            for route in self._plan.routes
        )
        if direct and None not in hosts and not any(self._is_limited(name) for name in (wan.a, wan.b)):
            names = [host for host in hosts if host is not None]
            return names, [self._end(name) for name in names]
        ends = endpoints(self._plan, self._network, wan.name)
        return ["", ""], [{"pid": end.pid, "address": str(end.address)} for end in ends]

    def paths(self, measured: set[tuple[int, ...]], floor: Mapping[str, float | None]) -> Iterator[dict[str, Any]]:
        """Paths of all hosts to the first host of the first other datacenter in reach, and back; but for the pairs
        that are measured as a link's ends."""
        wans = {wan.name: wan for wan in self._plan.wans}
        for datacenter in self._plan.datacenters:
            reached = [route for route in self._plan.routes if route.datacenter == datacenter.name]
            route = next((route for route in reached if self._first_host(route.destination)), None)
            peer = None if route is None else self._first_host(route.destination)
            if route is None or peer is None:
                continue
            ways: list[tuple[str, Direction]] = []
            at = datacenter.name
            for name in route.links:
                ways.append((name, "forward" if wans[name].a == at else "backward"))
                at = wans[name].b if wans[name].a == at else wans[name].a
            back: list[tuple[str, Direction]] = [
                (name, "backward" if way == "forward" else "forward") for name, way in reversed(ways)
            ]
            limited = self._is_limited(datacenter.name) or self._is_limited(route.destination)
            there = self._end(peer)
            for host in datacenter.hosts:
                if self._network.is_gone(self._network.hosts[host.name]):
                    continue
                here = self._end(host.name)
                if {(here["pid"], there["pid"]), (there["pid"], here["pid"])} & measured:
                    continue
                for source, target, name, links in (
                    (here, there, f"{host.name} > {peer}", ways),
                    (there, here, f"{peer} > {host.name}", back),
                ):
                    yield {
                        "name": name,
                        "source_pid": source["pid"],
                        "target_pid": target["pid"],
                        "address": target["address"],
                        "mtu": route.mtu,
                        "asked": [self._wan.asked(link, way).to_dict() for link, way in links],
                        "rate_is_told": not limited,
                        "floor_ns": floor.get(name),
                    }

    def _first_host(self, datacenter: str) -> str | None:
        """The first that is there."""
        for host in self._plan.hosts:
            if host.datacenter == datacenter and not self._network.is_gone(self._network.hosts[host.name]):
                return host.name
        return None

    def _is_limited(self, datacenter: str) -> bool:
        (plan,) = (one for one in self._plan.datacenters if one.name == datacenter)
        return plan.fabric_rate_bps is not None or plan.fabric_delay_ns > 0

    def _end(self, host: str) -> dict[str, Any]:
        (plan,) = (one for one in self._plan.hosts if one.name == host)
        return {"pid": self._network.pid_of(host), "address": str(plan.address.ip)}
