"""One packet socket with a receive ring that the kernel fills while this process is busy (AF_PACKET, TPACKET_V3).

Owns the socket, the memory shared with the kernel (linux/if_packet.h), and the classic BPF program by which the kernel
chooses packets and how many bytes of each. Opened in the current network namespace, which the socket keeps alive: the
process that holds it must die with the lab.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from testbed.capture import pcapng

BLOCK_BYTES = 1 << 20
RETIRE_MS = 10  # a block that is not full is handed over after at most twice this long
_ETH_P_ALL = 3
_ARPHRD_ETHER, _ARPHRD_LOOPBACK, _ARPHRD_NONE = 1, 772, 0xFFFE
_SIOCGIFHWADDR = 0x8927
_SO_ATTACH_FILTER = 26
_SOL_PACKET = 263
_PACKET_RX_RING, _PACKET_STATISTICS, _PACKET_VERSION, _TPACKET_V3 = 5, 6, 10, 2
_STATUS_AT, _TO_KERNEL, _TO_USER = 8, 0, 1
_BLOCK = struct.Struct("=III")  # at 8: status, packets, offset of the first
_PACKET = struct.Struct("=6IH")  # struct tpacket3_hdr: next, sec, nsec, kept, original, status, mac
_PKTTYPE_AT = 48 + 10  # sockaddr_ll follows the aligned header

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

# A line of a classic BPF program: a label, (code, constant), or (code, constant, label where true, label where false).
Line = str | tuple[int, int] | tuple[int, int, str, str]

LINKTYPES = {
    _ARPHRD_ETHER: pcapng.LINKTYPE_ETHERNET,
    _ARPHRD_LOOPBACK: pcapng.LINKTYPE_ETHERNET,
    _ARPHRD_NONE: pcapng.LINKTYPE_IPV4,
}


class InterfaceGone(OSError):
    """The interface was removed, or never was."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Bytes that are kept of a packet (`snaplen` None: all), and the size of the ring."""

    headers_only: bool = False
    snaplen: int | None = None
    ring_bytes: int = 64 << 20


# (Unix nanoseconds, what was kept, original bytes, pcapng.INBOUND | OUTBOUND)
Captured = tuple[int, bytes, int, int]


class Ring:
    """Packets of one interface. Raises InterfaceGone, OSError."""

    def __init__(self, ifname: str, selection: Selection, *, outgoing_only: bool) -> None:
        # protocol 0 until everything is set: nothing arrives before `bind`
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        try:
            self.linktype = self._linktype(ifname)
            self._attach_filter(selection, outgoing_only)
            self._blocks = max(4, selection.ring_bytes // BLOCK_BYTES)
            self._memory = self._map_ring()
            self._socket.bind((ifname, _ETH_P_ALL))
        except OSError as error:
            self._socket.close()
            if error.errno in (errno.ENODEV, errno.ENXIO):
                raise InterfaceGone(error.errno, f"interface {ifname} does not exist") from None
            raise
        self._next = 0
        self.received = self.dropped = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def _linktype(self, ifname: str) -> int:
        request = fcntl.ioctl(self._socket, _SIOCGIFHWADDR, struct.pack("16s24x", ifname.encode()))
        (kind,) = struct.unpack_from("=H", request, 16)
        if kind not in LINKTYPES:
            raise OSError(errno.EAFNOSUPPORT, f"interface {ifname} is of an unknown kind (ARPHRD {kind})")
        return LINKTYPES[kind]

    def _attach_filter(self, selection: Selection, outgoing_only: bool) -> None:
        code = bpf_program(
            outgoing_only=outgoing_only,
            ethernet=self.linktype == pcapng.LINKTYPE_ETHERNET,
            headers_only=selection.headers_only,
            snaplen=selection.snaplen,
        )
        buffer = ctypes.create_string_buffer(code, len(code))
        self._socket.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
        )

    def _map_ring(self) -> mmap.mmap:
        frame = 1 << 16  # a formality in version 3
        size = self._blocks * BLOCK_BYTES
        request = struct.pack("=7I", BLOCK_BYTES, self._blocks, frame, size // frame, RETIRE_MS, 0, 0)
        self._socket.setsockopt(_SOL_PACKET, _PACKET_VERSION, _TPACKET_V3)
        try:
            self._socket.setsockopt(_SOL_PACKET, _PACKET_RX_RING, request)
            return mmap.mmap(self.fileno(), size)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise OSError(errno.ENOMEM, f"no memory for a ring of {size >> 20} MiB") from None
            raise

    def ready_blocks(self) -> Iterator[list[Captured]]:
        """The packets of each block that is full or has waited long enough; each block is given back when read."""
        for _ in range(self._blocks):
            base = self._next * BLOCK_BYTES
            status, count, offset = _BLOCK.unpack_from(self._memory, base + _STATUS_AT)
            if not status & _TO_USER:
                return
            packets = self._read(base + offset, count)
            struct.pack_into("=I", self._memory, base + _STATUS_AT, _TO_KERNEL)
            self._next = (self._next + 1) % self._blocks
            yield packets

    def _read(self, at: int, count: int) -> list[Captured]:
        memory, unpack = self._memory, _PACKET.unpack_from
        packets: list[Captured] = []
        for _ in range(count):
            step, seconds, nanoseconds, kept, original, _, mac = unpack(memory, at)
            way = pcapng.OUTBOUND if memory[at + _PKTTYPE_AT] == PACKET_OUTGOING else pcapng.INBOUND
            begin = at + mac
            packets.append((seconds * 1_000_000_000 + nanoseconds, memory[begin : begin + kept], original, way))
            at += step
        return packets

    def count(self) -> None:
        """Bring `received` (dropped ones included) and `dropped` up to date; the kernel's counters start anew."""
        packets, drops, _ = struct.unpack("=3I", self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 12))
        self.received += packets
        self.dropped += drops

    def check(self) -> None:
        """Raise InterfaceGone when the interface went away."""
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise InterfaceGone(error, os.strerror(error))

    def close(self) -> None:
        self._memory.close()
        self._socket.close()


def bpf_program(*, outgoing_only: bool, ethernet: bool, headers_only: bool, snaplen: int | None) -> bytes:
    """The filter as struct sock_filter[]; `headers_only` keeps headers up to and including TCP's, UDP's or ICMP's."""
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
