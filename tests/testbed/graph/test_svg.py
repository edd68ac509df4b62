"""The topology as SVG: well-formed, the same bytes every time, and nothing on top of anything else."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings

from testbed.graph.layout import ARROW, CARD_PAD, Picture, lay_out
from testbed.graph.measure import NAME, SMALL, Rect, text_width
from testbed.graph.scene import Scene
from testbed.graph.svg import draw_svg
from tests.conftest import ROOT
from tests.testbed.graph.scenes import full_mesh, many_hosts, scene_of, scenes

DRAWN = {
    "two": scene_of(ROOT / "topologies" / "two-dc.yaml"),
    "three": scene_of(ROOT / "topologies" / "three-dc.yaml"),
    "mesh-of-five": full_mesh(5),
    "mesh-of-eight": full_mesh(8),
    "64-hosts": many_hosts(64),
}


def overlap(one: Rect, other: Rect) -> bool:
    return one.x < other.right and other.x < one.right and one.y < other.bottom and other.y < one.bottom


def within(inner: Rect, outer: Rect) -> bool:
    return (
        outer.x <= inner.x
        and inner.right <= outer.right + 0.01
        and outer.y <= inner.y
        and inner.bottom <= outer.bottom + 0.01
    )


def check(picture: Picture) -> None:
    """Everything that must hold of a picture whatever it shows."""
    paper = Rect(0, 0, picture.width, picture.height)
    for box in picture.boxes:
        assert within(box.rect, paper)
        assert within(box.fabric, box.rect)
        assert all(within(card.rect, box.rect) for card in box.cards)
        parts = [box.fabric, *(card.rect for card in box.cards)]
        assert not any(overlap(*pair) for pair in combinations(parts, 2))
        for card in box.cards:
            assert text_width(card.name, NAME, bold=True) <= card.rect.width - 24 + 0.01
            assert all(text_width(line, SMALL) <= card.rect.width - 24 + 0.01 for line in card.lines)
    assert all(one.rect.right < other.rect.x for one, other in pairwise(picture.boxes))
    for link in picture.links:
        assert within(link.card, paper)
        assert link.card.y > picture.floor
        assert link.start < link.card.x
        assert link.card.right < link.end
        room = link.card.width - 2 * CARD_PAD - ARROW + 0.01
        assert all(text_width(line.text, SMALL) <= room for line in link.lines)
    for one, other in combinations(picture.links, 2):
        assert not overlap(one.card, other.card)
        assert len({one.start, one.end, other.start, other.end}) == 4


def hidden(picture: Picture) -> list[tuple[str, str]]:
    """Links whose way down to their track passes behind another link's card."""
    return [
        (link.link.name, other.link.name)
        for link in picture.links
        for x in (link.start, link.end)
        for other in picture.links
        if other.y < link.y and other.card.x <= x <= other.card.right
    ]


@pytest.mark.parametrize("name", DRAWN)
def test_nothing_lies_on_anything_else_and_every_text_fits(name: str) -> None:
    picture = lay_out(DRAWN[name])
    check(picture)
    assert not hidden(picture)


@settings(max_examples=60)
@given(scenes())
def test_nothing_lies_on_anything_else_whatever_there_is_to_draw(drawn: Scene) -> None:
    picture = lay_out(drawn)
    check(picture)
    assert not hidden(picture)


@settings(max_examples=40)
@given(scenes())
def test_the_drawing_is_well_formed_with_every_name_in_full(drawn: Scene) -> None:
    root = ET.fromstring(draw_svg(drawn))
    said = {text for element in root.iter() for text in (element.text or "").splitlines()}
    assert {datacenter.name for datacenter in drawn.datacenters} <= said
    assert {host.name for datacenter in drawn.datacenters for host in datacenter.hosts} <= said
    assert {link.name for link in drawn.links} <= said


def test_the_same_file_gives_the_same_bytes_in_every_process() -> None:
    program = (
        "import sys; from testbed.topology import load_plan; from testbed.graph.scene import scene; "
        "from testbed.graph.svg import draw_svg; "
        "sys.stdout.write(draw_svg(scene(load_plan('topologies/three-dc.yaml'))))"
    )
    drawings = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            cwd=ROOT,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(drawings) == 1


@pytest.mark.parametrize("name", ["two-dc", "three-dc"])
def test_the_pictures_of_the_documentation_are_what_the_command_draws(name: str) -> None:
    drawn = draw_svg(scene_of(ROOT / "topologies" / f"{name}.yaml"))
    assert (ROOT / "docs" / f"{name}.svg").read_text() == drawn, (
        f"pddbed graph topologies/{name}.yaml -o docs/{name}.svg"
    )
