"""The topology as text: what it looks like, that its lines lead where they should, and that it fits."""

from pathlib import Path

import pytest
from hypothesis import given

from testbed.graph.scene import Scene
from testbed.graph.text import draw_text
from tests.conftest import ROOT
from tests.testbed.graph.scenes import full_mesh, many_hosts, scene_of, scenes

THREE = """\
three-dc  3 datacenters, 5 hosts, 3 WAN links, model tiny

┌ main  10.1.0.0/24 ───────────────┐
│ gw0   gateway · 10.1.0.2         │
│       API on 127.0.0.1:8000      │
│ p0    prefill · 10.1.0.3         ├─ wan-south ────┐
│ rld0  relay-decode · 10.1.0.4    ├─ wan-north ─┐  │
└──────────────────────────────────┘             │  │
                                                 │  │
┌ north  10.2.0.0/24 ──────────────┐             │  │
│ md-north  main-decode · 10.2.0.2 ├─ wan-north ─┘  │
│                                  ├─ wan-coast ─┐  │
└──────────────────────────────────┘             │  │
                                                 │  │
┌ south  10.3.0.0/24 ──────────────┐             │  │
│ md-south  main-decode · 10.3.0.2 ├─ wan-coast ─┘  │
│                                  ├─ wan-south ────┘
└──────────────────────────────────┘

wan-north  main ↔ north, RTT 24ms, MTU 1500
  each way  400mbit, 12ms, queue 1.2MB (24ms)
wan-coast  north ↔ south, RTT 30ms, MTU 1500
  each way  400mbit, 15ms, queue 1.5MB (30ms)
wan-south  main ↔ south, RTT 70ms, MTU 1500, cost 3
  each way  100mbit, 35ms, queue 1MiB (83.9ms)
"""


def test_three_datacenters_look_like_this() -> None:
    assert draw_text(scene_of(ROOT / "topologies" / "three-dc.yaml")) == THREE


@pytest.mark.parametrize("file", sorted((ROOT / "topologies").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_ready_topology_fits_into_80_columns(file: Path) -> None:
    assert max(map(len, draw_text(scene_of(file)).splitlines())) <= 80


def test_a_mesh_of_five_datacenters_and_64_hosts_fit_into_80_columns() -> None:
    for drawn in (draw_text(full_mesh(5)), draw_text(many_hosts(64))):
        assert max(map(len, drawn.splitlines())) <= 80
    assert all(f"host-{number} " in drawn for number in range(62))


def box_of(lines: list[str], line: int) -> int:
    """The datacenter (by number) whose box a line is in."""
    return sum(text.startswith("┌") for text in lines[: line + 1]) - 1


def follow(lines: list[str], line: int, column: int) -> int:
    """The line where the link that turns down at (line, column) comes back."""
    while lines[line + 1][column] in "│┼":
        line += 1
    assert lines[line + 1][column] == "┘"
    return line + 1


@given(scenes())
def test_the_lines_of_every_link_lead_from_one_of_its_datacenters_to_the_other(drawn: Scene) -> None:
    lines = draw_text(drawn).splitlines()
    lines = [line.ljust(200) for line in lines]
    found = set()
    for number, line in enumerate(lines):
        if "├─ " in line and "┐" in line.partition("├─ ")[2]:
            start = line.index("├─ ")
            name = line[start:].split()[1]
            other = follow(lines, number, line.index("┐", start))
            assert lines[other][start:].split()[1] == name
            found.add((name, box_of(lines, number), box_of(lines, other)))
    assert found == {(f"w{number}", min(ends), max(ends)) for number, ends in enumerate(drawn.ends)}


@given(scenes())
def test_boxes_are_closed_and_lines_end_without_blanks(drawn: Scene) -> None:
    lines = draw_text(drawn).splitlines()
    assert all(line == line.rstrip() for line in lines)
    tops = [line.index("┐") for line in lines if line.startswith("┌")]
    assert len(tops) == len(drawn.datacenters)
    assert len(set(tops)) == 1
    for line in lines:
        if line.startswith(("│", "└")):
            assert line[tops[0]] in "│├┘"
