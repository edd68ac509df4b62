"""Frames as a fuzzer can mutate them: without the checksums, which it would never hit. Pure.

A script is a run of entries `kind u8, message bytes u16, body bytes u32, message, body`; `to_stream` makes real frames
of them, with whatever sizes and checksums are right. What is cut off or too large comes out as it is.
"""

import struct
import zlib
from collections.abc import Iterator

from workers.wire.frames import HEADER, LIMITS, MAGIC, PROTOCOL_VERSION, Kind, parse_header

BLOCK_SIZE = 4  # of the recorded transfers: small seeds

_ENTRY = struct.Struct("!BHI")
_UNCHECKED = struct.Struct("!4sHHIQ")


def from_stream(stream: bytes) -> bytes:
    """The script of whole frames. Raises FrameError for bytes that are none."""
    script = bytearray()
    while stream:
        header = parse_header(stream[: HEADER.size])
        end = HEADER.size + header.message_bytes + header.body_bytes
        script += _ENTRY.pack(header.kind, header.message_bytes, header.body_bytes) + stream[HEADER.size : end]
        stream = stream[end:]
    return bytes(script)


def to_stream(script: bytes) -> bytes:
    """Frames whose checksums are right."""
    stream = bytearray()
    for kind, message, body_bytes, body in _entries(script):
        head = _UNCHECKED.pack(MAGIC, PROTOCOL_VERSION, kind, len(message), body_bytes)
        stream += head + zlib.crc32(message, zlib.crc32(head)).to_bytes(4, "big") + message + body
    return bytes(stream)


def _entries(script: bytes) -> Iterator[tuple[int, bytes, int, bytes]]:
    at = 0
    while at + _ENTRY.size <= len(script):
        kind, message_bytes, body_bytes = _ENTRY.unpack_from(script, at)
        at += _ENTRY.size
        message = script[at : at + message_bytes]
        at += message_bytes
        body = script[at : at + body_bytes]
        at += body_bytes
        yield kind, message, body_bytes, body


def without_handshake(stream: bytes) -> bytes:
    """What follows the handshake in a dialer's stream."""
    while stream and (header := parse_header(stream[: HEADER.size])).kind is Kind.HANDSHAKE:
        stream = stream[HEADER.size + header.message_bytes :]
    return stream


assert set(LIMITS) == set(Kind)
