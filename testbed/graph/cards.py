"""A WAN link's card, which lies on its line and has its values. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from testbed.graph.metrics import LINE, LONGEST_NAME, NAME, SMALL, Rect
from testbed.graph.scene import DOT, LinkText, Row
from testbed.graph.shorten import shorten
from testbed.graph.textwidth import text_width

CARD_TEXT = 330.0  # widest line of values
CARD_PAD = 12.0
ARROW = 19.0  # what a row's arrow takes


@dataclass(frozen=True, slots=True)
class CardLine:
    """A line of text on a link's card. `arrow`: both, right, left or none."""

    arrow: str
    text: str
    row: Row


@dataclass(frozen=True, slots=True)
class Wire:
    """A link: down at `start`, along `y`, up at `end` (both x); its card lies on it."""

    start: float
    end: float
    y: float
    card: Rect
    name: str
    lines: tuple[CardLine, ...]
    link: LinkText


class LinkCard:
    """A link's card before it has a place."""

    def __init__(self, name: str, lines: tuple[CardLine, ...], link: LinkText) -> None:
        self._name, self._lines, self._link = name, lines, link
        facts = text_width(DOT.join(link.facts), SMALL)
        head = text_width(name, NAME, bold=True) + 20 + facts
        self.width = 2 * CARD_PAD + max(head, *(ARROW + text_width(line.text, SMALL) for line in lines))
        self.height = 30 + LINE * len(lines)

    def place(self, start: float, end: float, middle: float, y: float) -> Wire:
        rect = Rect(middle - self.width / 2, y - self.height / 2, self.width, self.height)
        return Wire(start, end, y, rect, self._name, self._lines, self._link)


def link_card(link: LinkText, ends: tuple[int, int]) -> LinkCard:
    """The card of a link; `ends` are the positions of its datacenters in the row."""
    lines: list[CardLine] = []
    for row in link.rows:
        arrow = "both" if row.way == "both" else "right" if (row.way == "forward") == (ends[0] < ends[1]) else "left"
        for number, text in enumerate(_wrap(row.parts)):
            lines.append(CardLine(arrow if number == 0 else "none", text, row))
    return LinkCard(shorten(link.name, LONGEST_NAME), tuple(lines), link)


def _wrap(parts: Sequence[str]) -> list[str]:
    """Values joined by commas, in lines that fit on a card."""
    lines: list[str] = []
    for part in parts:
        if lines and text_width(f"{lines[-1]}, {part}", SMALL) <= CARD_TEXT:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return lines
