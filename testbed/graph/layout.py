"""Positions of everything in a picture: datacenters side by side, WAN links on tracks below them. Pure.

The datacenters' lower edges are on one line, where their border routers are; from there each link goes down to its
track, along it through a card with its values, and up again. Short links run near the datacenters; a link crosses
another only where no order could prevent it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from testbed.graph.measure import (
    LINE,
    LONGEST_NAME,
    NAME,
    PAD,
    PORT_GAP,
    ROUTER_HEIGHT,
    SMALL,
    TITLE,
    Rect,
    cut,
    shorten,
    text_width,
)
from testbed.graph.scene import DOT, DatacenterText, HostText, LinkText, Scene, Verdict

HOST_GAP = 9.0
FABRIC_HEIGHT = 20.0
LONGEST_LINE = 38  # characters
MANY = 9  # hosts, from which on a box is less wide for its height
EMPTY_PLACE = 3.0  # how much an empty place among the hosts weighs against a box of the wrong shape
CARD_TEXT = 330.0  # widest line of values
CARD_PAD = 12.0
ARROW = 19.0  # what a row's arrow takes
MARGIN = 28.0
BOX_GAP = 44.0
CARD_GAP = 20.0  # between cards on neighbouring tracks
STUB = 22.0  # of a track, before and after its card


@dataclass(frozen=True, slots=True)
class Track:
    """One link: from the datacenter at position `start` to the one at `end` (start < end)."""

    link: int  # index
    start: int
    end: int
    depth: int  # 0 is nearest to the datacenters


def tracks(ends: Sequence[tuple[int, int]]) -> tuple[Track, ...]:
    """A track for every link, in the order of the links. `ends`: positions of its datacenters, in any order."""
    spans = [(max(pair) - min(pair), min(pair), index) for index, pair in enumerate(ends)]
    taken: list[list[tuple[int, int]]] = []  # per depth
    found: dict[int, Track] = {}
    for span, start, index in sorted(spans):
        end = start + span
        depth = 0
        # Links that only share a datacenter do not meet: one ends before the other begins (see `ports`).
        while depth < len(taken) and any(start < other_end and other < end for other, other_end in taken[depth]):
            depth += 1
        if depth == len(taken):
            taken.append([])
        taken[depth].append((start, end))
        found[index] = Track(index, start, end, depth)
    return tuple(found[index] for index in range(len(ends)))


def ports(laid: Sequence[Track], position: int) -> list[Track]:
    """The links of the datacenter at `position`, in the order in which they leave it along the row.

    First those that come from before it, the nearest track first; then those that go on, the farthest first.
    """
    coming = sorted((track for track in laid if track.end == position), key=lambda track: track.depth)
    going = sorted((track for track in laid if track.start == position), key=lambda track: -track.depth)
    return coming + going


@dataclass(frozen=True, slots=True)
class HostCard:
    """A host's card; texts are shortened to what fits."""

    rect: Rect
    name: str
    lines: tuple[str, ...]
    host: HostText


@dataclass(frozen=True, slots=True)
class Box:
    """A datacenter."""

    rect: Rect
    name: str
    fabric: Rect
    router: Rect
    cards: tuple[HostCard, ...]
    datacenter: DatacenterText


class BoxSize:
    """Size of a datacenter's box, and the texts in it. `shape`: wanted width to height."""

    def __init__(self, datacenter: DatacenterText, links: int, shape: float) -> None:
        self._datacenter = datacenter
        hosts = datacenter.hosts
        self._names = [shorten(host.name, LONGEST_NAME) for host in hosts]
        self._lines = [tuple(cut(line, LONGEST_LINE) for line in host.lines) for host in hosts]
        self._name = shorten(datacenter.name, LONGEST_NAME)
        self.exits_width = max(links - 1, 0) * PORT_GAP
        self._router_width = max(text_width(datacenter.router, SMALL) + 52, self.exits_width + 28)
        self._card_width = 24 + max(
            [text_width(name, NAME, bold=True) for name in self._names]
            + [text_width(line, SMALL) for lines in self._lines for line in lines],
            default=0,
        )
        heading = text_width(self._name, TITLE, bold=True) + 18 + text_width(datacenter.subnet, SMALL)
        self._least = 2 * PAD + max(heading, text_width(datacenter.fabric, SMALL) + 24, self._router_width + 20)
        self._in_row = self._best_columns(shape if len(hosts) < MANY else shape * 0.65)
        self.width, self.height = self._measure(self._in_row)

    _head = PAD + TITLE + 12
    _foot = 10 + ROUTER_HEIGHT / 2

    def _row_heights(self, columns: int) -> list[float]:
        rows = [self._lines[start : start + columns] for start in range(0, len(self._lines), columns)]
        return [24 + LINE * max(map(len, row)) for row in rows]

    def _measure(self, columns: int) -> tuple[float, float]:
        """Width and height of the box with so many hosts in a row."""
        width = max(self._least, 2 * PAD + columns * (self._card_width + HOST_GAP) - HOST_GAP)
        rows = sum(height + HOST_GAP for height in self._row_heights(columns)) or NAME
        return width, self._head + rows + 4 + FABRIC_HEIGHT + self._foot

    def _best_columns(self, wanted: float) -> int:
        """Hosts in a row: near to the wanted shape, with few empty places."""
        count = len(self._names)

        def badness(columns: int) -> float:
            width, height = self._measure(columns)
            empty = -count % columns / count
            return max(width / height / wanted, wanted * height / width) + EMPTY_PLACE * empty

        return min(range(1, count + 1), key=badness, default=1)

    def place(self, left: float, floor: float) -> Box:
        """The box with its lower edge on `floor`."""
        rect = Rect(left, floor - self.height, self.width, self.height)
        inner = self.width - 2 * PAD
        width = (inner + HOST_GAP) / self._in_row - HOST_GAP
        heights = self._row_heights(self._in_row)
        cards = []
        for index, host in enumerate(self._datacenter.hosts):
            row, column = divmod(index, self._in_row)
            x = left + PAD + column * (width + HOST_GAP)
            y = rect.y + self._head + sum(heights[:row]) + row * HOST_GAP
            cards.append(HostCard(Rect(x, y, width, heights[row]), self._names[index], self._lines[index], host))
        fabric = Rect(left + PAD, floor - self._foot - FABRIC_HEIGHT, inner, FABRIC_HEIGHT)
        router = Rect(
            left + (self.width - self._router_width) / 2, floor - ROUTER_HEIGHT / 2, self._router_width, ROUTER_HEIGHT
        )
        return Box(rect, self._name, fabric, router, tuple(cards), self._datacenter)


@dataclass(frozen=True, slots=True)
class CardLine:
    """A line of text on a link's card. `arrow`: both, right, left or none."""

    arrow: str
    text: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class LinkDrawing:
    """A link: down at `start`, along `y`, up at `end` (both x); its card lies on it."""

    start: float
    end: float
    y: float
    card: Rect
    name: str
    lines: tuple[CardLine, ...]
    link: LinkText

    def place(self, start: float, end: float, middle: float, y: float) -> "LinkDrawing":
        width, height = self.card.width, self.card.height
        return replace(self, start=start, end=end, y=y, card=Rect(middle - width / 2, y - height / 2, width, height))


def link_card(link: LinkText, ends: tuple[int, int]) -> LinkDrawing:
    """A link with its card, in no place yet; `ends` are the positions of its datacenters in the row."""
    lines: list[CardLine] = []
    for line in link.lines:
        arrow = "both" if line.way == "both" else "right" if (line.way == "forward") == (ends[0] < ends[1]) else "left"
        for number, text in enumerate(_wrap(line.parts)):
            lines.append(CardLine(arrow if number == 0 else "none", text, line.verdict))
    name = shorten(link.name, LONGEST_NAME)
    heading = text_width(name, NAME, bold=True) + 20 + text_width(DOT.join(link.facts), SMALL)
    width = 2 * CARD_PAD + max(heading, *(ARROW + text_width(line.text, SMALL) for line in lines))
    return LinkDrawing(0, 0, 0, Rect(0, 0, width, 30 + LINE * len(lines)), name, tuple(lines), link)


def _wrap(parts: Sequence[str]) -> list[str]:
    """Values joined by commas, in lines that fit on a card."""
    lines: list[str] = []
    for part in parts:
        if lines and text_width(f"{lines[-1]}, {part}", SMALL) <= CARD_TEXT:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return lines


@dataclass(frozen=True, slots=True)
class Picture:
    """A whole picture; `floor` is the line of the lower edges of the datacenters."""

    width: float
    height: float
    floor: float
    boxes: tuple[Box, ...]
    links: tuple[LinkDrawing, ...]


def lay_out(scene: Scene) -> Picture:
    """Positions for a scene."""
    laid = tracks(scene.ends)
    cards = [link_card(link, ends) for link, ends in zip(scene.links, scene.ends, strict=True)]
    shape = 2.4 if len(scene.datacenters) < 3 else 1.9 if len(scene.datacenters) < 5 else 1.1
    sizes = [BoxSize(datacenter, len(ports(laid, index)), shape) for index, datacenter in enumerate(scene.datacenters)]
    heading = MARGIN + TITLE + 8 + LINE * (1 + len(scene.warnings)) + 18
    floor = heading + max(size.height for size in sizes)
    lefts = _columns(sizes, laid, [link.card.width for link in cards])
    boxes = [size.place(left, floor) for size, left in zip(sizes, lefts, strict=True)]
    exits = {
        (track.link, index): box.router.middle + (place - (len(here) - 1) / 2) * PORT_GAP
        for index, box in enumerate(boxes)
        for here in [ports(laid, index)]
        for place, track in enumerate(here)
    }
    drawn = []
    y = floor + ROUTER_HEIGHT / 2 + CARD_GAP
    for depth in range(1 + max((track.depth for track in laid), default=-1)):
        here = [track for track in laid if track.depth == depth]
        height = max(cards[track.link].card.height for track in here)
        for track in here:
            start, end = exits[track.link, track.start], exits[track.link, track.end]
            drawn.append(cards[track.link].place(start, end, _card_middle(track, laid, exits, cards), y + height / 2))
        y += height + CARD_GAP
    drawn.sort(key=lambda one: [link.name for link in scene.links].index(one.link.name))
    right = max([box.rect.right for box in boxes] + [_heading_width(scene)])
    bottom = y - CARD_GAP if drawn else floor + ROUTER_HEIGHT / 2
    return Picture(right + MARGIN, bottom + MARGIN, floor, tuple(boxes), tuple(drawn))


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
    track: Track, laid: Sequence[Track], exits: Mapping[tuple[int, int], float], cards: Sequence[LinkDrawing]
) -> float:
    """Place of a card on its track: near the middle, clear of the links that go down to farther tracks."""
    passing = [
        exits[other.link, position]
        for position in range(track.start + 1, track.end)
        for other in ports(laid, position)
        if other.depth > track.depth
    ]
    ends = sorted([exits[track.link, track.start], exits[track.link, track.end], *passing])
    middle, room = (ends[0] + ends[-1]) / 2, cards[track.link].card.width / 2 + STUB / 2
    found = []
    for left, right in pairwise(ends):
        if right - left >= 2 * room:
            found.append(min(max(middle, left + room), right - room))
    return min(found, key=lambda place: abs(place - middle), default=middle)
