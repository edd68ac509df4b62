"""The two directions of a WAN link: forward is from its datacenter `a` to `b`."""

from typing import Literal

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
