"""Capture points in a lab: where a capture opens its sockets, and what its file says of the lab for a later audit.

Runs inside the lab. A link is captured where each direction leaves its border router, before the link's own delay
and loss; `at` chooses one router, and both directions as they pass there. A host is captured at its interface.
"""

from collections.abc import Iterator
from typing import Protocol

from testbed.capture.context import Context, LabHost, Passage
from testbed.lab.messages import CapturePoint
from testbed.lab.network import HOST_IFNAME, Network
from testbed.lab.record import Record
from testbed.lab.wan import WanControl
from testbed.model.plan import LabPlan, RoutePlan, WanPlan


class CapturedLab(Protocol):
    """The parts of a running lab that are read."""

    plan: LabPlan
    record: Record
    network: Network
    wan: WanControl


def describe(lab: CapturedLab, name: str, at: str | None) -> tuple[list[CapturePoint], Context]:
    """Points and context of a WAN link or host. Raises LookupError for names that the lab does not know."""
    plan = lab.plan
    links = {wan.name: wan for wan in plan.wans}
    hosts = {host.name: host for host in plan.hosts}
    host = None
    if name in links:
        points = _link_points(lab, links[name], at)
        passages = tuple(_link_passages(lab, links[name], at))
    elif name in hosts:
        if at is not None:
            raise LookupError(f'--at chooses an end of a WAN link, and "{name}" is a host; leave it out')
        host = name
        leaving, arriving = f"from {name}", f"to {name}"
        points = [CapturePoint(lab.network.pid_of(name), HOST_IFNAME, name, f"interface of {name}", leaving, arriving)]
        passages = tuple(_host_passages(lab, name))
    else:
        raise LookupError(
            f'no WAN link or host "{name}" in this lab; links: {", ".join(links)}; hosts: {", ".join(hosts)}'
        )
    context = Context(
        lab=plan.name,
        started=lab.record.state().get("started", 0.0),
        point=name,
        host=host,
        hosts=tuple(LabHost(h.name, h.datacenter, str(h.address.ip), h.port, h.role) for h in plan.hosts),
        passages=passages,
        interfaces=tuple((point.leaving, point.arriving or "") for point in points),
    )
    return points, context


def _link_points(lab: CapturedLab, wan: WanPlan, at: str | None) -> list[CapturePoint]:
    there, back = f"{wan.a} > {wan.b}", f"{wan.b} > {wan.a}"
    ends = lab.network.links[wan.name].ends
    sides = [(wan.a, ends[0], there, back), (wan.b, ends[1], back, there)]
    if at is None:
        return [
            CapturePoint(end.pid, end.ifname, f"{wan.name} {leaving}", f"leaving router.{datacenter}", leaving, None)
            for datacenter, end, leaving, _ in sides
        ]
    if at not in (wan.a, wan.b):
        raise LookupError(f'WAN link "{wan.name}" has no end in "{at}"; its ends are {wan.a} and {wan.b}')
    return [
        CapturePoint(end.pid, end.ifname, wan.name, f"at router.{datacenter}", leaving, arriving)
        for datacenter, end, leaving, arriving in sides
        if datacenter == at
    ]


def _link_passages(lab: CapturedLab, wan: WanPlan, at: str | None) -> Iterator[Passage]:
    for route in lab.plan.routes:
        if wan.name not in route.links:
            continue
        delays = _delays_ns(lab, route)
        place = route.links.index(wan.name)
        source = _sources(lab.plan, route)[place]
        if at is not None and at != source:  # seen where it arrives: this link's delay lies behind it
            place += 1
        direction = f"{source} > {wan.b if source == wan.a else wan.a}"
        yield Passage(route.datacenter, route.destination, direction, sum(delays[:place]), sum(delays[place:]))


def _host_passages(lab: CapturedLab, name: str) -> Iterator[Passage]:
    home = next(host.datacenter for host in lab.plan.hosts if host.name == name)
    yield Passage(home, home, f"from {name}", 0, 0)
    yield Passage(home, home, f"to {name}", 0, 0)
    for route in lab.plan.routes:
        if route.datacenter == home:
            yield Passage(home, route.destination, f"from {name}", 0, sum(_delays_ns(lab, route)))
        if route.destination == home:
            yield Passage(route.datacenter, home, f"to {name}", sum(_delays_ns(lab, route)), 0)


def _sources(plan: LabPlan, route: RoutePlan) -> list[str]:
    """The datacenter that each link of a route is entered from."""
    wans = {wan.name: wan for wan in plan.wans}
    sources = [route.datacenter]
    for link in route.links:
        wan = wans[link]
        sources.append(wan.b if sources[-1] == wan.a else wan.a)
    return sources[:-1]


def _delays_ns(lab: CapturedLab, route: RoutePlan) -> list[int]:
    """The one-way delay that each link of a route is asked for now."""
    wans = {wan.name: wan for wan in lab.plan.wans}
    return [
        lab.wan.asked(link, "forward" if source == wans[link].a else "backward").delay_ns
        for link, source in zip(route.links, _sources(lab.plan, route), strict=True)
    ]
