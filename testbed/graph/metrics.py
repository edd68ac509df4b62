"""Sizes that the parts of a drawing share, in pixels, and rectangles. y grows downwards."""

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
