"""The guest's byte streams: everything up to a trailer, and the command's status out of the trailer."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class TrailedStream:
    """Splits `data \\0 NONCE status \\n` into data, passed on at once, and the status.

    Only bytes that could begin the trailer are held back, so output is live.
    """

    nonce: bytes
    status: int | None = None
    _held: bytes = field(default=b"")

    @property
    def marker(self) -> bytes:
        return b"\0" + self.nonce + b" "

    def feed(self, data: bytes) -> bytes:
        """The bytes of `data` (and of earlier calls) that are certainly output."""
        if self.status is not None:
            return b""
        held = self._held + data
        start = held.find(self.marker)
        if start >= 0:
            number, newline, _ = held[start + len(self.marker) :].partition(b"\n")
            if newline:
                self.status = int(number)
                self._held = b""
                return held[:start]
        else:
            start = len(held) - _overlap(held, self.marker)
        self._held = held[start:]
        return held[:start]

    def rest(self) -> bytes:
        """What was held back, when the stream ended without a trailer."""
        held, self._held = self._held, b""
        return held


def _overlap(data: bytes, marker: bytes) -> int:
    """Length of the longest end of `data` that begins `marker`."""
    for length in range(min(len(data), len(marker) - 1), 0, -1):
        if data.endswith(marker[:length]):
            return length
    return 0
