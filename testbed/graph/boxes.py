"""A datacenter's box: its hosts' cards, the strip of its fabric, and its border router on the lower edge. Pure."""

from dataclasses import dataclass

from testbed.graph.metrics import LINE, LONGEST_NAME, NAME, PAD, PORT_GAP, ROUTER_HEIGHT, SMALL, TITLE, Rect
from testbed.graph.scene import DatacenterText, HostText
from testbed.graph.shorten import cut, shorten
from testbed.graph.textwidth import text_width

HOST_GAP = 9.0
FABRIC_HEIGHT = 20.0
LONGEST_LINE = 38  # characters
MANY = 9  # hosts, from which on a box is less wide for its height
EMPTY_PLACE = 3.0  # how much an empty place among the hosts weighs against a box of the wrong shape


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
    """How large a datacenter's box is, and what is in it. `shape`: wanted width to height."""

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
