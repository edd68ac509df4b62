"""Whose traffic passes a point of capture, and how far from sender and receiver it lies."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testbed.capture.capture_points import describe
from testbed.topology import load_plan

# a chain: main -10ms- middle -30ms- far; the second link is written against the direction of travel
CHAIN = """
name: chain
datacenters:
  main:   {subnet: 10.1.0.0/24, hosts: {gw0: {role: gateway}, p0: {role: prefill}, rld0: {role: relay-decode}}}
  middle: {subnet: 10.2.0.0/24, hosts: {x0: {}}}
  far:    {subnet: 10.3.0.0/24, hosts: {md0: {role: main-decode}}}
wan:
  - {name: near, between: [main, middle], delay: 10ms}
  - {name: away, between: [far, middle], delay: 30ms}
model: {name: tiny}
"""
MS = 1_000_000


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    """Plan and asked values of a lab that is not running: enough to describe points."""
    file = tmp_path / "chain.yaml"
    file.write_text(CHAIN)
    plan = load_plan(file)
    wans = {wan.name: wan for wan in plan.wans}
    ends = {name: (SimpleNamespace(pid=1, ifname="wan0"), SimpleNamespace(pid=2, ifname="wan1")) for name in wans}
    return SimpleNamespace(
        plan=plan,
        record=SimpleNamespace(state=lambda: {"started": 1.0}),
        network=SimpleNamespace(
            links={name: SimpleNamespace(ends=pair) for name, pair in ends.items()}, pid_of=lambda name: 3
        ),
        wan=SimpleNamespace(asked=lambda name, direction: getattr(wans[name], direction)),
    )


def _passages(lab: Any, name: str, at: str | None = None) -> dict[tuple[str, str], tuple[str, int, int]]:
    _, context = describe(lab, name, at)
    assert context.passages is not None
    return {(p.source, p.target): (p.direction, p.before_ns // MS, p.after_ns // MS) for p in context.passages}


def test_a_link_carries_what_is_routed_over_it_in_the_direction_of_travel(lab: Any) -> None:
    assert _passages(lab, "away") == {
        ("main", "far"): ("middle > far", 10, 30),
        ("far", "main"): ("far > middle", 0, 40),
        ("middle", "far"): ("middle > far", 0, 30),
        ("far", "middle"): ("far > middle", 0, 30),
    }


def test_at_one_end_of_a_link_arrivals_have_its_delay_behind_them(lab: Any) -> None:
    assert _passages(lab, "away", "middle") == {
        ("main", "far"): ("middle > far", 10, 30),
        ("far", "main"): ("far > middle", 30, 10),
        ("middle", "far"): ("middle > far", 0, 30),
        ("far", "middle"): ("far > middle", 30, 0),
    }


def test_a_link_is_captured_where_each_direction_leaves(lab: Any) -> None:
    points, _ = describe(lab, "away", None)
    assert [(p.pid, p.name, p.leaving, p.arriving) for p in points] == [
        (1, "away far > middle", "far > middle", None),
        (2, "away middle > far", "middle > far", None),
    ]
    points, _ = describe(lab, "away", "middle")
    assert [(p.pid, p.leaving, p.arriving) for p in points] == [(2, "middle > far", "far > middle")]


def test_a_host_is_either_sender_or_receiver(lab: Any) -> None:
    _, context = describe(lab, "md0", None)
    hosts = {host.name: host for host in context.hosts}
    there, back = context.passage(hosts["p0"], hosts["md0"]), context.passage(hosts["md0"], hosts["p0"])
    assert there is not None
    assert back is not None
    assert (there.direction, there.before_ns, there.after_ns) == ("to md0", 40 * MS, 0)
    assert (back.direction, back.before_ns, back.after_ns) == ("from md0", 0, 40 * MS)
    assert context.passage(hosts["p0"], hosts["rld0"]) is None
    _, context = describe(lab, "p0", None)
    neighbours = context.passage(hosts["p0"], hosts["rld0"]), context.passage(hosts["gw0"], hosts["p0"])
    assert [passage and passage.direction for passage in neighbours] == ["from p0", "to p0"]


@pytest.mark.parametrize(
    ("name", "at", "says"),
    [
        ("wan7", None, "links: near, away; hosts: gw0, p0, rld0, x0, md0"),
        ("near", "far", "its ends are main and middle"),
        ("p0", "main", '"p0" is a host'),
    ],
)
def test_unknown_names_are_answered_with_those_that_exist(lab: Any, name: str, at: str | None, says: str) -> None:
    with pytest.raises(LookupError, match=says):
        describe(lab, name, at)
