"""A capture file as TCP segments, read with scapy's raw readers (pcapng and pcap, also gzipped).

Headers are taken apart here, because scapy's full dissection costs a hundred times as much; only packets of a link
type that is not plain IPv4 or Ethernet go through scapy's layers. A TCP super-packet is one long segment.
"""

import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from testbed.capture.pcapng import INBOUND, LINKTYPE_ETHERNET, LINKTYPE_IPV4

_LINKTYPE_RAW = (12, 14, 101)  # DLT_RAW and LINKTYPE_RAW
_MOST_BYTES = 1 << 20  # scapy cuts packets at 65,535 bytes unless told otherwise
_TCP = 6
_IP = struct.Struct("!BxHxxHxB2x4s4s")  # version and length, total, fragment, protocol, source, target
_TCP_HEAD = struct.Struct("!HHIIBB")
SYN, ACK = 2, 16


class UnreadableCapture(Exception):
    """Not a capture file, or one that ends at once."""


class Segment(NamedTuple):
    """One TCP segment. `data` is what was captured of its `size` payload bytes."""

    time_ns: int
    interface: int  # in the file's order
    arriving: bool
    source: tuple[bytes, int]  # IPv4 address, port
    target: tuple[bytes, int]
    sequence: int
    acknowledged: int | None
    flags: int
    size: int
    data: bytes


@dataclass
class FileFacts:
    """Counts of the packets that are no TCP segments, and the time that the file spans (Unix ns)."""

    packets: int = 0
    first_ns: int | None = None
    last_ns: int | None = None
    other_packets: dict[tuple[int, bool], int] = field(default_factory=dict)  # by (interface, arriving)
    other_bytes: dict[tuple[int, bool], int] = field(default_factory=dict)  # IP bytes, or the whole frame


def read_segments(file: Path, facts: FileFacts) -> Iterator[Segment]:
    """Every TCP segment over IPv4, in the file's order; `facts` grows on the way. Raises UnreadableCapture."""
    for time_ns, interface, arriving, linktype, data, original in _packets(file):
        facts.packets += 1
        facts.first_ns = time_ns if facts.first_ns is None else facts.first_ns
        facts.last_ns = max(facts.last_ns or 0, time_ns)
        ip, cut_bytes = _ip_packet(linktype, data)
        segment = None if ip is None else _segment(time_ns, interface, arriving, ip, original - cut_bytes)
        if segment is not None:
            yield segment
            continue
        key = (interface, arriving)
        facts.other_packets[key] = facts.other_packets.get(key, 0) + 1
        facts.other_bytes[key] = facts.other_bytes.get(key, 0) + original - cut_bytes


def _packets(file: Path) -> Iterator[tuple[int, int, bool, int, bytes, int]]:
    """(time in ns, interface, arriving, link type, captured bytes, original length)."""
    from scapy.error import Scapy_Exception
    from scapy.utils import RawPcapNgReader, RawPcapReader

    logging.getLogger("scapy.runtime").setLevel(logging.ERROR)  # a torn last block is told by our own sentence
    try:
        reader: Any = RawPcapReader(str(file))
    except Scapy_Exception as error:
        raise UnreadableCapture(f"{file} is no capture file that can be read ({error})") from None
    except OSError as error:
        raise UnreadableCapture(f"cannot read {file}: {error.strerror}") from None
    numbers: dict[Any, int] = {}
    with reader:
        while True:
            try:
                data, about = reader._read_packet(_MOST_BYTES)
            except EOFError:
                return
            if not isinstance(reader, RawPcapNgReader):
                time_ns = about.sec * 1_000_000_000 + about.usec * (1 if reader.nano else 1000)
                yield time_ns, 0, False, reader.linktype, data, about.wirelen
                continue
            time_ns = ((about.tshigh or 0) << 32 | (about.tslow or 0)) * 1_000_000_000 // about.tsresol
            if about.ifname not in numbers:
                numbers |= {entry[2].get("name"): number for number, entry in enumerate(reader.interfaces)}
            interface = numbers.get(about.ifname, 0)
            yield time_ns, interface, about.direction == INBOUND, about.linktype, data, about.wirelen


def _ip_packet(linktype: int, data: bytes) -> tuple[bytes | None, int]:
    """The IPv4 packet inside (None: there is none) and the bytes before it."""
    if linktype == LINKTYPE_ETHERNET:
        at = 14
        return (data[at:], at) if data[12:14] == b"\x08\x00" else (None, 0)
    if linktype in (LINKTYPE_IPV4, *_LINKTYPE_RAW):
        return (data, 0) if data and data[0] >> 4 == 4 else (None, 0)
    return _dissected(linktype, data)


def _dissected(linktype: int, data: bytes) -> tuple[bytes | None, int]:
    """The same as `_ip_packet`, for whatever else scapy knows (Linux cooked captures, VLANs and the like)."""
    from scapy.config import conf
    from scapy.layers.inet import IP

    if linktype not in conf.l2types.num2layer:
        return None, 0
    frame = conf.l2types[linktype](data)
    if IP not in frame:
        return None, 0
    at = len(data) - len(frame[IP].original)
    return data[at:], at


def _segment(time_ns: int, interface: int, arriving: bool, ip: bytes, length: int) -> Segment | None:
    """The TCP segment in a packet of `length` bytes, of which `ip` was captured; None: no TCP, or too little of it."""
    if len(ip) < 20:
        return None
    version, total, fragment, protocol, source, target = _IP.unpack_from(ip)
    header = (version & 15) * 4
    if protocol != _TCP or fragment & 0x1FFF or len(ip) < header + _TCP_HEAD.size:
        return None
    sport, dport, sequence, acknowledged, offset, flags = _TCP_HEAD.unpack_from(ip, header)
    begin = header + (offset >> 4) * 4
    # Ethernet pads short frames; a super-packet beyond 64 KiB has no length of its own
    end = total or length
    return Segment(
        time_ns,
        interface,
        arriving,
        (source, sport),
        (target, dport),
        sequence,
        acknowledged if flags & ACK else None,
        flags,
        max(0, end - begin),
        ip[begin:end],
    )
