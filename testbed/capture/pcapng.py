"""The pcapng file format as `capture` writes it: section, interfaces, packets with nanosecond stamps, statistics.

Pure bytes in and out, plus the few reads that scapy does not offer (the section's comments, the statistics at the
end, and where the last whole block of a torn file ends). Format: draft-ietf-opsawg-pcapng.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

SECTION, INTERFACE, PACKET, STATISTICS = 0x0A0D0D0A, 1, 6, 5
BYTE_ORDER_MAGIC = 0x1A2B3C4D
LINKTYPE_ETHERNET, LINKTYPE_IPV4 = 1, 228  # libpcap refuses two interfaces of LINKTYPE_RAW (101)
INBOUND, OUTBOUND = 1, 2  # epb_flags, bits 0-1
COMMENT_BYTES = 60_000  # of one comment; an option's length is 16 bits

_OPT_COMMENT = 1
_PACKET_HEAD = struct.Struct("<7I")
_PADDING = (b"", b"\0\0\0", b"\0\0", b"\0")
# epb_flags (code 2) and the end of options, then the block's length: per direction, ready to append
_PACKET_TAIL = {way: struct.pack("<HHIHH", 2, 4, way, 0, 0) for way in (INBOUND, OUTBOUND)}
_FIXED_BYTES = _PACKET_HEAD.size + 12 + 4


def _option(code: int, value: bytes) -> bytes:
    return struct.pack("<HH", code, len(value)) + value + _PADDING[len(value) & 3]


def _block(kind: int, body: bytes) -> bytes:
    length = struct.pack("<I", len(body) + 12)
    return struct.pack("<I", kind) + length + body + length


def section_block(comment: str) -> bytes:
    """The file's first block. `comment` may be longer than one option holds; `read_comment` joins the parts."""
    data = comment.encode()
    parts = [data[at : at + COMMENT_BYTES] for at in range(0, len(data), COMMENT_BYTES)]
    options = b"".join(_option(_OPT_COMMENT, part) for part in parts) + _option(4, b"pddbed capture") + b"\0\0\0\0"
    return _block(SECTION, struct.pack("<IHHq", BYTE_ORDER_MAGIC, 1, 0, -1) + options)


def interface_block(name: str, description: str, linktype: int, snaplen: int) -> bytes:
    """One interface; packets name it by the order of these blocks. `snaplen` 0: no limit."""
    options = _option(2, name.encode()) + _option(3, description.encode()) + _option(9, b"\x09") + b"\0\0\0\0"
    return _block(INTERFACE, struct.pack("<HHI", linktype, 0, snaplen) + options)


def packet_block(interface: int, time_ns: int, data: bytes, original_bytes: int, direction: int) -> bytes:
    """One packet: `data` is what was kept of its `original_bytes`."""
    kept = len(data)
    padding = _PADDING[kept & 3]
    length = _FIXED_BYTES + kept + len(padding)
    head = _PACKET_HEAD.pack(PACKET, length, interface, time_ns >> 32, time_ns & 0xFFFFFFFF, kept, original_bytes)
    return b"".join((head, data, padding, _PACKET_TAIL[direction], length.to_bytes(4, "little")))


@dataclass(frozen=True, slots=True)
class Statistics:
    """One interface's account of a capture; times are Unix nanoseconds."""

    interface: int
    begun_ns: int
    ended_ns: int
    received: int  # packets that the kernel offered, dropped ones included
    dropped: int  # that found no room in the ring: missing from the file


def statistics_block(account: Statistics) -> bytes:
    """The account, at the end of the file."""

    def stamp(time_ns: int) -> bytes:
        return struct.pack("<II", time_ns >> 32, time_ns & 0xFFFFFFFF)

    options = (
        _option(2, stamp(account.begun_ns))
        + _option(3, stamp(account.ended_ns))
        + _option(4, struct.pack("<Q", account.received))
        + _option(5, struct.pack("<Q", account.dropped))
        + b"\0\0\0\0"
    )
    return _block(STATISTICS, struct.pack("<I", account.interface) + stamp(account.ended_ns) + options)


# -- reading what scapy leaves out ---------------------------------------------------------------------------------


def _options(data: bytes) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    at = 0
    while at + 4 <= len(data):
        code, length = struct.unpack_from("<HH", data, at)
        if code == 0:
            break
        found.setdefault(code, []).append(data[at + 4 : at + 4 + length])
        at += 4 + length + (-length & 3)
    return found


def read_comment(file: Path) -> str | None:
    """The comment of a little-endian pcapng file's section; None for any other file."""
    with file.open("rb") as stream:
        head = stream.read(24)
        if len(head) < 24:
            return None
        kind, length, magic = struct.unpack_from("<III", head)
        if kind != SECTION or magic != BYTE_ORDER_MAGIC:
            return None
        parts = _options(stream.read(length - 28)).get(_OPT_COMMENT, [])
    return b"".join(parts).decode(errors="replace") if parts else None


def read_statistics(file: Path) -> list[Statistics]:
    """The accounts at the end of a pcapng file, in order; [] where the capture was not ended properly."""
    found = []
    with file.open("rb") as stream:
        end = stream.seek(0, os.SEEK_END)
        while end >= 12:
            stream.seek(end - 4)
            (length,) = struct.unpack("<I", stream.read(4))
            if not 12 <= length <= end:
                break
            stream.seek(end - length)
            block = stream.read(length)
            if struct.unpack_from("<II", block) != (STATISTICS, length):
                break
            found.append(_statistics(block))
            end -= length
    return found[::-1]


def _statistics(block: bytes) -> Statistics:
    options = {code: values[0] for code, values in _options(block[20:-4]).items()}

    def stamp(code: int) -> int:
        high, low = struct.unpack("<II", options[code])
        return int(high) << 32 | int(low)

    (interface,) = struct.unpack_from("<I", block, 8)
    received, dropped = (struct.unpack("<Q", options[code])[0] for code in (4, 5))
    return Statistics(interface, stamp(2), stamp(3), received, dropped)


def end_of_whole_blocks(stream: BinaryIO, start: int = 0) -> int:
    """The end of the last whole block; `start` is the beginning of some block. The stream must be seekable."""
    size = stream.seek(0, os.SEEK_END)
    at = start
    while at + 12 <= size:
        stream.seek(at + 4)
        (length,) = struct.unpack("<I", stream.read(4))
        if length < 12 or at + length > size:
            break
        at += length
    return at
