"""Classic BPF programs that a packet socket runs in the kernel: which packets, and how many bytes of each.

Owns instructions; knows no sockets. Loads refer to a packet as the socket sees it: from its link-layer header on a
veth (Ethernet), from its IPv4 header on a TUN device.
"""

import struct
from collections.abc import Sequence

KEEP_ALL = 0x40000  # more than any packet: a super-packet is 64 KiB and its headers
NON_IP_BYTES = 64  # kept of what is not IPv4 (ARP) in header-only mode
ETHERNET_BYTES = 14
PACKET_OUTGOING = 4  # sockaddr_ll.sll_pkttype

_LOAD_BYTE, _LOAD_HALF, _LOAD_BYTE_AT_X = 0x30, 0x28, 0x50
_LOAD_X_IP_HEADER_BYTES = 0xB1
_IF_EQUAL, _IF_BITS = 0x15, 0x45
_ADD, _ADD_X, _AND, _SHIFT_RIGHT = 0x04, 0x0C, 0x54, 0x74
_COPY_X = 0x87
_KEEP, _KEEP_A = 0x06, 0x16
_PKTTYPE = 0xFFFFF000 + 4  # SKF_AD_OFF + SKF_AD_PKTTYPE

# A label, (code, constant), or (code, constant, label where true, label where false).
Line = str | tuple[int, int] | tuple[int, int, str, str]


def program(*, outgoing_only: bool, ethernet: bool, headers_only: bool, snaplen: int | None) -> bytes:
    """struct sock_filter[]: `headers_only` keeps exactly the headers, up to and including TCP's, UDP's or ICMP's."""
    lines: list[Line] = []
    if outgoing_only:
        lines += [(_LOAD_BYTE, _PKTTYPE), (_IF_EQUAL, PACKET_OUTGOING, "leaving", "arriving")]
        lines += ["arriving", (_KEEP, 0), "leaving"]
    if headers_only:
        lines += _headers(ETHERNET_BYTES if ethernet else 0)
    else:
        lines.append((_KEEP, KEEP_ALL if snaplen is None else snaplen))
    return assemble(lines)


def _headers(ip: int) -> list[Line]:
    """Keep the headers of a packet whose IPv4 header begins at `ip`."""
    if ip:
        is_ipv4: list[Line] = [(_LOAD_HALF, 12), (_IF_EQUAL, 0x0800, "ipv4", "not ipv4")]
    else:
        is_ipv4 = [(_LOAD_BYTE, 0), (_AND, 0xF0), (_IF_EQUAL, 0x40, "ipv4", "not ipv4")]
    return [
        *is_ipv4,
        "not ipv4",
        (_KEEP, NON_IP_BYTES),
        "ipv4",
        (_LOAD_X_IP_HEADER_BYTES, ip),
        (_LOAD_HALF, ip + 6),
        (_IF_BITS, 0x1FFF, "later fragment", "whole"),
        "later fragment",
        (_COPY_X, 0),
        (_ADD, ip),
        (_KEEP_A, 0),
        "whole",
        (_LOAD_BYTE, ip + 9),
        (_IF_EQUAL, 6, "tcp", "eight bytes"),
        "tcp",
        (_LOAD_BYTE_AT_X, ip + 12),  # data offset, in words, in the upper half
        (_SHIFT_RIGHT, 2),
        (_AND, 0x3C),
        (_ADD_X, 0),
        (_ADD, ip),
        (_KEEP_A, 0),
        "eight bytes",  # UDP, ICMP and whatever else
        (_COPY_X, 0),
        (_ADD, ip + 8),
        (_KEEP_A, 0),
    ]


def assemble(lines: Sequence[Line]) -> bytes:
    """Resolve labels; jumps go forward only, as the kernel demands."""
    labels: dict[str, int] = {}
    instructions: list[tuple[int, int] | tuple[int, int, str, str]] = []
    for line in lines:
        if isinstance(line, str):
            labels[line] = len(instructions)
        else:
            instructions.append(line)
    packed = []
    for number, (code, constant, *targets) in enumerate(instructions):
        true, false = (labels[label] - number - 1 for label in targets) if targets else (0, 0)
        packed.append(struct.pack("=HBBI", code, true, false, constant))
    return b"".join(packed)
