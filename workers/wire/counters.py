"""Bytes on the wire, by peer, direction and class. Headers and handshakes included: what TCP was given as payload."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from workers.wire.frames import COUNTED_AS, Kind

Direction = Literal["sent", "received"]
CLASSES = ("kv", "token-ids", "control", "padding")


@dataclass(slots=True)
class Count:
    bytes: int = 0
    frames: int = 0


class Counters:
    """One worker's byte counters."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], Count] = defaultdict(Count)

    def add(self, peer: str, direction: Direction, kind: Kind, frame_bytes: int) -> None:
        """Count one whole frame."""
        count = self._counts[peer, direction, COUNTED_AS[kind]]
        count.bytes += frame_bytes
        count.frames += 1

    def bytes(self, peer: str, direction: Direction, traffic_class: str) -> int:
        """Bytes exchanged with a peer in one class (see CLASSES)."""
        count = self._counts.get((peer, direction, traffic_class))
        return count.bytes if count else 0

    def rows(self) -> list[tuple[str, str, str, int, int]]:
        """(peer, direction, class, bytes, frames), sorted."""
        return sorted((*key, count.bytes, count.frames) for key, count in self._counts.items())
