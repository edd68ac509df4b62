"""Where everything of a picture stands: datacenters side by side, WAN links on tracks below them. Pure.

The datacenters' lower edges are on one line, where their border routers are; from there each link goes down to its
track, along it through a card with its values, and up again. Boxes are `boxes`'s, cards `cards`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from testbed.graph.boxes import Box, BoxSize
from testbed.graph.cards import LinkCard, Wire, link_card
from testbed.graph.metrics import LINE, PORT_GAP, ROUTER_HEIGHT, SMALL, TITLE
from testbed.graph.scene import Scene
from testbed.graph.textwidth import text_width
from testbed.graph.tracks import Track, ports, tracks

MARGIN = 28.0
BOX_GAP = 44.0
CARD_GAP = 20.0  # between cards on neighbouring tracks
STUB = 22.0  # of a track, before and after its card


@dataclass(frozen=True, slots=True)
class Picture:
    """A whole picture; `floor` is the line of the lower edges of the datacenters."""

    width: float
    height: float
    floor: float
    boxes: tuple[Box, ...]
    wires: tuple[Wire, ...]


def lay_out(scene: Scene) -> Picture:
    """Positions for a scene."""
    laid = tracks(scene.ends)
    cards = [link_card(link, ends) for link, ends in zip(scene.links, scene.ends, strict=True)]
    shape = 2.4 if len(scene.datacenters) < 3 else 1.9 if len(scene.datacenters) < 5 else 1.1
    sizes = [BoxSize(datacenter, len(ports(laid, index)), shape) for index, datacenter in enumerate(scene.datacenters)]
    heading = MARGIN + TITLE + 8 + LINE * (1 + len(scene.warnings)) + 18
    floor = heading + max(size.height for size in sizes)
    lefts = _columns(sizes, laid, [card.width for card in cards])
    boxes = [size.place(left, floor) for size, left in zip(sizes, lefts, strict=True)]
    exits = {
        (track.link, index): box.router.middle + (place - (len(here) - 1) / 2) * PORT_GAP
        for index, box in enumerate(boxes)
        for here in [ports(laid, index)]
        for place, track in enumerate(here)
    }
    wires = []
    y = floor + ROUTER_HEIGHT / 2 + CARD_GAP
    for depth in range(1 + max((track.depth for track in laid), default=-1)):
        here = [track for track in laid if track.depth == depth]
        height = max(cards[track.link].height for track in here)
        for track in here:
            start, end = exits[track.link, track.start], exits[track.link, track.end]
            wires.append(cards[track.link].place(start, end, _card_middle(track, laid, exits, cards), y + height / 2))
        y += height + CARD_GAP
    wires.sort(key=lambda wire: [link.name for link in scene.links].index(wire.link.name))
    right = max([box.rect.right for box in boxes] + [_heading_width(scene)])
    bottom = y - CARD_GAP if wires else floor + ROUTER_HEIGHT / 2
    return Picture(right + MARGIN, bottom + MARGIN, floor, tuple(boxes), tuple(wires))


def _heading_width(scene: Scene) -> float:
    lines = [scene.subtitle, *scene.warnings]
    return MARGIN + max(text_width(scene.title, TITLE, bold=True), *(text_width(line, SMALL) for line in lines))


def _columns(sizes: Sequence[BoxSize], laid: Sequence[Track], widths: Sequence[float]) -> list[float]:
    """The left edge of each datacenter: as near to the one before as their links' cards allow."""
    lefts = [MARGIN]
    for index in range(1, len(sizes)):
        before, after = sizes[index - 1], sizes[index]
        left = lefts[-1] + before.width + BOX_GAP
        cards = [widths[track.link] for track in laid if _home_gap(track) == index]
        if cards:
            # Between the last exit of the one router and the first of the other.
            exits = lefts[-1] + (before.width + before.exits_width) / 2
            left = max(left, exits + max(cards) + 2 * STUB - (after.width - after.exits_width) / 2)
        lefts.append(left)
    return lefts


def _home_gap(track: Track) -> int:
    """The gap between datacenters (by the position after it) that surely has room for a link's card."""
    return (track.start + track.end + 1) // 2


def _card_middle(
    track: Track, laid: Sequence[Track], exits: Mapping[tuple[int, int], float], cards: Sequence[LinkCard]
) -> float:
    """Where on its track a card lies: near the middle, clear of the links that go down to farther tracks."""
    passing = [
        exits[other.link, position]
        for position in range(track.start + 1, track.end)
        for other in ports(laid, position)
        if other.depth > track.depth
    ]
    ends = sorted([exits[track.link, track.start], exits[track.link, track.end], *passing])
    middle, room = (ends[0] + ends[-1]) / 2, cards[track.link].width / 2 + STUB / 2
    found = []
    for left, right in pairwise(ends):
        if right - left >= 2 * room:
            found.append(min(max(middle, left + room), right - room))
    return min(found, key=lambda place: abs(place - middle), default=middle)
