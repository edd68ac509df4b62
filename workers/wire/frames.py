"""The frame: a fixed header, one msgpack message, and for KV the raw bytes of blocks; and counts of frames. No sockets.

Every size in a header is checked against the limit of its kind before anything is allocated for it.
"""

import struct
import zlib
from collections import defaultdict
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

MAGIC = b"PDDB"
PROTOCOL_VERSION = 3  # 2: padding; KV that leaves while prefill computes. 3: penalties, which a 2 would not see

# magic, protocol version, kind, message bytes, body bytes, crc32 of the 20 bytes before it and of the message
HEADER = struct.Struct("!4sHHIQI")
_UNCHECKED_HEADER = struct.Struct("!4sHHIQ")

MIB = 1 << 20


class Kind(IntEnum):
    """The content of a frame. A frame's kind is also the class under which its bytes are counted."""

    HANDSHAKE = 1
    CONTROL = 2
    TOKEN_IDS = 3
    KV = 4
    PADDING = 5  # bytes that mean nothing: the receiver drops them


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest message and body (bytes) that a frame of one kind may announce."""

    message: int
    body: int


# A handshake comes from someone who has not shown the secret yet: a few KB, never more. A control message may
# carry a prompt of a million tokens at five bytes each.
LIMITS = {
    Kind.HANDSHAKE: Limit(4 << 10, 0),
    Kind.CONTROL: Limit(16 * MIB, 0),
    Kind.TOKEN_IDS: Limit(16 * MIB, 0),
    Kind.KV: Limit(1 * MIB, 256 * MIB),
    Kind.PADDING: Limit(64, 1 * MIB),
}

COUNTED_AS = {
    Kind.HANDSHAKE: "control",
    Kind.CONTROL: "control",
    Kind.TOKEN_IDS: "token-ids",
    Kind.KV: "kv",
    Kind.PADDING: "padding",
}


class WireError(Exception):
    """Anything that goes wrong between two workers; `name` is what clients and records see."""

    name = "wire_error"


class FrameError(WireError):
    """Bytes that are not a frame of this protocol, or one that exceeds its limits."""

    name = "bad_frame"


@dataclass(frozen=True, slots=True)
class Header:
    """A header that passed the checks which need no message."""

    kind: Kind
    message_bytes: int
    body_bytes: int
    checksum: int
    raw: bytes

    def verify(self, message: bytes | memoryview) -> None:
        """Raise FrameError unless header and message are those that were sent."""
        actual = zlib.crc32(message, zlib.crc32(self.raw[: _UNCHECKED_HEADER.size]))
        if actual != self.checksum:
            raise FrameError(f"frame checksum is {actual:#010x}, its header says {self.checksum:#010x}")


def pack(kind: Kind, message: bytes, body_bytes: int = 0) -> bytes:
    """Header and message in one piece; the body follows on the wire. Raises FrameError beyond the kind's limits."""
    _check_sizes(kind, len(message), body_bytes)
    head = _UNCHECKED_HEADER.pack(MAGIC, PROTOCOL_VERSION, kind, len(message), body_bytes)
    checksum = zlib.crc32(message, zlib.crc32(head))
    return b"".join((head, checksum.to_bytes(4, "big"), message))


def parse_header(raw: bytes | memoryview) -> Header:
    """Check magic, version, kind and sizes of HEADER.size bytes. Raises FrameError."""
    raw = bytes(raw)
    magic, version, kind_number, message_bytes, body_bytes, checksum = HEADER.unpack(raw)
    if magic != MAGIC:
        raise FrameError(f"frame starts with {magic!r} instead of {MAGIC!r}: not a pddbed worker")
    if version != PROTOCOL_VERSION:
        raise FrameError(
            f"peer speaks wire protocol {version}, this worker {PROTOCOL_VERSION}; run the same pddbed on both"
        )
    try:
        kind = Kind(kind_number)
    except ValueError:
        raise FrameError(f"frame kind {kind_number} is unknown to wire protocol {PROTOCOL_VERSION}") from None
    _check_sizes(kind, message_bytes, body_bytes)
    return Header(kind, message_bytes, body_bytes, checksum, raw)


def _check_sizes(kind: Kind, message_bytes: int, body_bytes: int) -> None:
    limit = LIMITS[kind]
    if message_bytes > limit.message:
        raise FrameError(f"{kind.name} message of {message_bytes} bytes exceeds the limit of {limit.message}")
    if body_bytes > limit.body:
        raise FrameError(f"{kind.name} body of {body_bytes} bytes exceeds the limit of {limit.body}")


Direction = Literal["sent", "received"]
CLASSES = ("kv", "token-ids", "control", "padding")


@dataclass(slots=True)
class Count:
    bytes: int = 0
    frames: int = 0


class Counters:
    """One worker's bytes on the wire, by peer, direction and class: what TCP was given as payload, headers and
    handshakes included.
    """

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
