"""Sizes of a drawing, in pixels (y grows downwards), widths of texts, and texts shortened to their place. Pure."""

from dataclasses import dataclass

TITLE, NAME, SMALL = 17.0, 12.5, 11.0  # font sizes
LINE = 15.5  # between two lines of small text
PAD = 14.0  # within a datacenter's box
ROUTER_HEIGHT = 24.0
PORT_GAP = 18.0  # between two links at a router
LONGEST_NAME = 34  # characters


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle by its upper left corner."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


# Widths of the characters 32 to 126 in DejaVu Sans, the widest font that pictures ask for, in thousandths of its size.
# fmt: off
_REGULAR = (
    318, 401, 460, 838, 636, 950, 780, 275, 390, 390, 500, 838, 318, 361, 318, 337, 636, 636, 636, 636, 636,
    636, 636, 636, 636, 636, 337, 337, 838, 838, 838, 531, 1000, 684, 686, 698, 770, 632, 575, 775, 752, 295,
    295, 656, 557, 863, 748, 787, 603, 787, 695, 635, 611, 732, 684, 989, 685, 611, 685, 390, 337, 390, 838,
    500, 500, 613, 635, 550, 635, 615, 352, 635, 634, 278, 278, 579, 278, 974, 634, 612, 635, 635, 411, 521,
    392, 634, 592, 818, 592, 592, 525, 636, 337, 636, 838,
)
_BOLD = (
    348, 456, 521, 838, 696, 1002, 872, 306, 457, 457, 523, 838, 380, 415, 380, 365, 696, 696, 696, 696, 696,
    696, 696, 696, 696, 696, 400, 400, 838, 838, 838, 580, 1000, 774, 762, 734, 830, 683, 683, 821, 837, 372,
    372, 775, 637, 995, 837, 850, 733, 850, 770, 720, 682, 812, 774, 1103, 771, 724, 725, 457, 365, 457, 838,
    500, 500, 675, 716, 593, 716, 678, 435, 716, 712, 343, 343, 665, 343, 1042, 712, 687, 716, 716, 493, 595,
    478, 712, 652, 924, 645, 652, 582, 712, 365, 712, 838,
)
# fmt: on
_OTHER = 1000  # beyond ASCII: more than any letter takes, wide scripts aside, which names do not have


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Width of `text` in the unit of `size`."""
    widths = _BOLD if bold else _REGULAR
    return sum(widths[ord(c) - 32] if 32 <= ord(c) < 127 else _OTHER for c in text) * size / 1000


ELLIPSIS = "\u2026"


def shorten(text: str, most: int) -> str:
    """`text` in at most `most` characters (at least 3), its middle left out where needed."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return text[: most - 1 - tail] + ELLIPSIS + text[-tail:]


def cut(text: str, most: int) -> str:
    """`text` in at most `most` characters, its end left out where needed: for what is read from the beginning."""
    return text if len(text) <= most else text[: most - 1] + ELLIPSIS
