"""Contents of a picture in words, whatever draws it: hosts by kind, links with what is asked and measured. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from testbed.model.direction import DIRECTIONS, Direction
from testbed.model.impairment import Impairment
from testbed.model.plan import HostPlan, LabPlan, WanPlan
from testbed.model.units import printable, short_duration
from testbed.topology.describe import direction_parts, fabric_parts
from testbed.verify.words import phrase

DOT = " \u00b7 "  # between two short facts
Kind = Literal["gateway", "prefill", "relay-decode", "main-decode", "command", "host"]
Way = Literal["both", "forward", "backward"]
Verdict = Literal["asked", "ok", "failed", "outdated"]  # outdated: measured, but the link is asked something else now


class SceneError(Exception):
    """The running lab is not one of the plan; one sentence."""


@dataclass(frozen=True, slots=True)
class LinkLine:
    """One line about a link: what a direction is asked to do, or what was measured of it and whether that will do."""

    way: Way
    parts: tuple[str, ...]
    verdict: Verdict = "asked"


@dataclass(frozen=True, slots=True)
class LinkText:
    """A WAN link in words. `facts` hold for both directions."""

    name: str
    facts: tuple[str, ...]
    lines: tuple[LinkLine, ...]

    @property
    def ok(self) -> bool:
        """True unless something measured is outside of its tolerance."""
        return all(line.verdict != "failed" for line in self.lines)


@dataclass(frozen=True, slots=True)
class HostText:
    """A host in words; `lines` follow its name."""

    name: str
    kind: Kind
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DatacenterText:
    """A datacenter in words."""

    name: str
    subnet: str
    fabric: str
    router: str
    hosts: tuple[HostText, ...]


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that a picture shows. `ends`: positions of each link's two datacenters."""

    title: str
    subtitle: str
    warnings: tuple[str, ...]
    datacenters: tuple[DatacenterText, ...]
    links: tuple[LinkText, ...]
    ends: tuple[tuple[int, int], ...]


def scene(plan: LabPlan, status: Mapping[str, Any] | None = None) -> Scene:
    """The scene of a plan; with the `status` of a running lab, what its links do now and what was measured of them.

    Raises SceneError.
    """
    running = _running(plan, status) if status is not None else {}
    api = f"{plan.api_address}:{plan.api_port}" if status is None else (status["api"] or "").removeprefix("http://")
    positions = {datacenter.name: index for index, datacenter in enumerate(plan.datacenters)}
    verified = (status or {}).get("verified")
    return Scene(
        title=plan.name if status is None else status["name"],
        subtitle=_subtitle(plan, status is not None, verified is not None),
        warnings=tuple(verified["reasons"]) if verified else (),
        datacenters=tuple(
            DatacenterText(
                name=datacenter.name,
                subnet=str(datacenter.subnet),
                fabric=", ".join([datacenter.switch, *fabric_parts(datacenter)]),
                router=str(datacenter.router_address.ip),
                hosts=tuple(host_text(host, api) for host in datacenter.hosts),
            )
            for datacenter in plan.datacenters
        ),
        links=tuple(link_text(wan, running.get(wan.name)) for wan in plan.wans),
        ends=tuple((positions[wan.a], positions[wan.b]) for wan in plan.wans),
    )


def host_text(host: HostPlan, api: str) -> HostText:
    """A host in words; `api` is where the gateway listens on this machine, empty where nothing serves."""
    kind: Kind = host.role or ("command" if host.command else "host")  # type: ignore[assignment]
    lines = [f"{'plain host' if kind == 'host' else kind}{DOT}{host.address.ip}"]
    if host.command:
        lines.append(printable(f"$ {' '.join(host.command.split())}"))
    if host.role == "gateway" and api:
        lines.append(f"API on {api}")
    lines += [f"port {entry.host_port} on {entry.listen_address}:{entry.listen_port}" for entry in host.publish]
    return HostText(host.name, kind, tuple(lines))


def link_text(wan: WanPlan, running: Mapping[str, Any] | None = None) -> LinkText:
    """A link in words: asked by the file, or asked now and measured where `running` (of `_running`) is given."""
    asked: dict[Direction, Impairment] = {"forward": wan.forward, "backward": wan.backward}
    driver = None if wan.driver == "auto" else wan.driver
    measured: Mapping[Direction, list[dict[str, Any]]] = {}
    if running is not None:
        asked = {way: Impairment.from_dict(running["asked"][way]) for way in DIRECTIONS}
        driver, measured = running["driver"], running["measured"]
    rtt = sum(impairment.delay_ns for impairment in asked.values())
    facts = [driver, f"RTT {short_duration(rtt, 4)}", f"MTU {wan.mtu}", f"cost {wan.cost}" if wan.cost != 1 else None]
    lines: list[LinkLine] = []
    if asked["forward"] == asked["backward"]:
        lines.append(LinkLine("both", (*direction_parts(asked["forward"]), *_change(wan, asked))))
    for way in DIRECTIONS:
        if asked["forward"] != asked["backward"]:
            lines.append(LinkLine(way, (*direction_parts(asked[way]), *_change(wan, {way: asked[way]}))))
        lines += _measured(way, asked[way], measured.get(way, []))
    return LinkText(wan.name, tuple(fact for fact in facts if fact), tuple(lines))


def _measured(way: Direction, asked: Impairment, figures: list[dict[str, Any]]) -> Iterator[LinkLine]:
    """The row of a verification's figures, in the order of what is asked: rate first."""
    words = [phrase(figure) for figure in sorted(figures, key=lambda figure: not figure["figure"].startswith("rate"))]
    parts = [part for part in words if part is not None]
    if not parts:
        return
    parts[0] = f"measured {parts[0]}"
    if any(figure["asked"] != _asked_of(asked, figure) for figure in figures):
        yield LinkLine(way, (*parts, "before the change"), "outdated")
    elif all(figure["ok"] for figure in figures):
        yield LinkLine(way, tuple(parts), "ok")
    else:
        yield LinkLine(way, (*parts, "OUT OF TOLERANCE"), "failed")


def _asked_of(asked: Impairment, figure: Mapping[str, Any]) -> float | None:
    """The value that a figure is about, of an impairment as it is now; base units."""
    match figure["figure"].partition(" ")[0]:
        case "delay":
            return asked.delay_ns
        case "jitter":
            return asked.jitter.std_ns if asked.jitter else None
        case "rate":
            return asked.rate_bps
        case "loss":
            return asked.loss.mean if asked.loss else 0.0
        case "queue":
            return asked.queue_bytes
        case _:
            return figure["asked"]  # type: ignore[no-any-return]


def _change(wan: WanPlan, asked: Mapping[Direction, Impairment]) -> tuple[str, ...]:
    return ("changed",) if any(getattr(wan, way) != asked[way] for way in asked) else ()


def _running(plan: LabPlan, status: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Per link: `asked` now, `driver`, and the figures of the last verification. Raises SceneError."""
    asked = {(wan.name, wan.a, wan.b) for wan in plan.wans}
    there = {(link["name"], *link["between"]) for link in status["links"]}
    hosts = {(host["name"], host["datacenter"]) for host in status["hosts"]}
    if asked != there or hosts != {(host.name, host.datacenter) for host in plan.hosts}:
        raise SceneError(
            f'lab "{status["name"]}" has other hosts or links than this file; it was raised from {status["file"]}'
        )
    verified = {link["name"]: link["directions"] for link in (status["verified"] or {"links": []})["links"]}
    return {link["name"]: {**link, "measured": verified.get(link["name"], {})} for link in status["links"]}


def _subtitle(plan: LabPlan, running: bool, verified: bool) -> str:
    counts = [
        _count(len(plan.datacenters), "datacenter"),
        _count(len(plan.hosts), "host"),
        _count(len(plan.wans), "WAN link"),
    ]
    if any(host.role for host in plan.hosts):
        counts.append(f"model {printable(plan.model['name'].rpartition('/')[2])}")
    if running:
        counts.append("running, links as measured" if verified else "running, not measured")
    return ", ".join(counts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
