"""Packets as a TUN device with virtio-net headers hands them over: one IPv4 packet, or a TSO super-packet.

Owns the virtio-net header (struct virtio_net_hdr, linux/virtio_net.h), the counting of MTU segments and
the cutting of a super-packet into smaller ones exactly as the kernel's tcp_gso_segment would. No I/O.
"""

from random import Random
from struct import Struct

VNET = Struct("<BBHHHH")  # flags, gso_type, hdr_len (a hint), gso_size, csum_start, csum_offset
VNET_BYTES = VNET.size
NEEDS_CSUM = 1
GSO_NONE = 0
GSO_TCPV4 = 1
GSO_ECN = 0x80
# Reads must never be cut short: a whole super-packet (64 KiB, gso_max_size) behind its header.
READ_BYTES = VNET_BYTES + 65536

_UDP_CHECK_AT = 6
_TCP_CHECK_AT = 16  # of the checksum inside the TCP header; the kernel's csum_offset
_FIN_PSH = 0x09
_CWR = 0x80
_U16_PAIR = Struct(">HH")
_U16 = Struct(">H")
_U32 = Struct(">I")

# What a TUN write takes: one buffer, or a header and a view of the payload for writev.
Frame = bytes | tuple[bytes | bytearray, memoryview]


class NotIPv4(Exception):
    """Noise such as IPv6 router solicitations: ignored and counted."""


class Malformed(Exception):
    """A packet whose headers contradict each other or its length."""


class Packet:
    """One read from the TUN. `segments` MTU packets with `ip_bytes` in all, headers of each included."""

    __slots__ = ("_headers", "_mss", "_payload", "data", "ip_bytes", "segments")

    def __init__(self, data: bytes) -> None:
        """Raises NotIPv4 or Malformed."""
        self.data = data
        if len(data) < VNET_BYTES + 20:
            raise Malformed
        if data[VNET_BYTES] & 0xF0 != 0x40:
            raise NotIPv4
        if data[1] == GSO_NONE:
            self.segments = 1
            self.ip_bytes = len(data) - VNET_BYTES
        else:
            self._measure_super_packet(data)

    def _measure_super_packet(self, data: bytes) -> None:
        flags, gso_type, _, mss, csum_start, csum_offset = VNET.unpack_from(data)
        ip = VNET_BYTES
        try:
            tcp_bytes = data[ip + csum_start + 12] >> 4 << 2
        except IndexError:
            raise Malformed from None
        self._headers = csum_start + tcp_bytes
        self._mss = mss
        self._payload = payload = len(data) - ip - self._headers
        if (
            gso_type & ~GSO_ECN != GSO_TCPV4
            or not flags & NEEDS_CSUM
            or csum_offset != _TCP_CHECK_AT
            or csum_start != (data[ip] & 0x0F) << 2
            or csum_start < 20
            or tcp_bytes < 20
            or mss == 0
            or payload <= 0
            or data[ip + 9] != 6
            or _U16.unpack_from(data, ip + 2)[0] != len(data) - ip
        ):
            raise Malformed
        self.segments = -(-payload // mss)
        self.ip_bytes = payload + self.segments * self._headers

    @property
    def segment_bytes(self) -> int:
        """IP bytes of a full segment."""
        return self.ip_bytes if self.segments == 1 else self._headers + self._mss

    def bytes_of(self, first: int, last: int) -> int:
        """IP bytes of segments first..last-1, headers of each included."""
        if first == 0 and last == self.segments:
            return self.ip_bytes
        payload = min(last * self._mss, self._payload) - first * self._mss
        return payload + (last - first) * self._headers

    def segments_within(self, ip_bytes: int) -> int:
        """Number of the first segments that fit into `ip_bytes`."""
        if ip_bytes >= self.ip_bytes:
            return self.segments
        if self.segments == 1 or ip_bytes <= 0:
            return 0
        return min(ip_bytes // (self._headers + self._mss), self.segments - 1)

    def cut(self, first: int, last: int) -> Frame:
        """Segments first..last-1 as one frame: still a super-packet where they are several."""
        if first == 0 and last == self.segments:
            return self.data
        data, mss, headers = self.data, self._mss, self._headers
        begin = first * mss
        end = min(last * mss, self._payload)
        payload_at = VNET_BYTES + headers
        head = bytearray(data[:payload_at])
        flags, gso_type, hdr_len, _, csum_start, csum_offset = VNET.unpack_from(head)
        if last - first == 1:
            gso_type = mss = 0
        elif first:
            gso_type &= ~GSO_ECN
        VNET.pack_into(head, 0, flags, gso_type, min(hdr_len, headers), mss, csum_start, csum_offset)
        self._rewrite_ip(head, csum_start, headers + end - begin, first)
        self._rewrite_tcp(head, VNET_BYTES + csum_start, begin, first, last)
        return head, memoryview(data)[payload_at + begin : payload_at + end]

    @staticmethod
    def _rewrite_ip(head: bytearray, ip_header: int, ip_bytes: int, first: int) -> None:
        ip = VNET_BYTES
        ident = _U16.unpack_from(head, ip + 4)[0]
        _U16_PAIR.pack_into(head, ip + 2, ip_bytes, (ident + first) & 0xFFFF)
        head[ip + 10 : ip + 12] = b"\0\0"
        _U16.pack_into(head, ip + 10, 0xFFFF ^ ones_sum(head[ip : ip + ip_header]))

    def _rewrite_tcp(self, head: bytearray, tcp: int, begin: int, first: int, last: int) -> None:
        sequence = _U32.unpack_from(head, tcp + 4)[0]
        _U32.pack_into(head, tcp + 4, (sequence + begin) & 0xFFFFFFFF)
        if last < self.segments:
            head[tcp + 13] &= ~_FIN_PSH
        if first:
            head[tcp + 13] &= ~_CWR
        # The checksum is still to be finished by whoever needs it: only the pseudo-header's sum stands
        # there, and it contains the length.
        tcp_bytes = _U16.unpack_from(head, VNET_BYTES + 2)[0] - (tcp - VNET_BYTES)
        _U16.pack_into(head, tcp + _TCP_CHECK_AT, pseudo_header_sum(head, tcp_bytes))


def corrupted(frame: Frame, random: Random) -> bytes:
    """One packet (not a super-packet) with one bit flipped after its checksum was finished.

    The IP version is spared: what has another one is no IP packet, and no device would take it.
    """
    data = bytearray(frame if isinstance(frame, bytes) else b"".join(frame))
    flags, _, _, _, csum_start, csum_offset = VNET.unpack_from(data)
    field = VNET_BYTES + csum_start + csum_offset
    if flags & NEEDS_CSUM and field + 2 <= len(data):
        checksum = 0xFFFF ^ ones_sum(data[VNET_BYTES + csum_start :])
        if checksum == 0 and csum_offset == _UDP_CHECK_AT:
            checksum = 0xFFFF  # in UDP zero means "none" (RFC 768)
        _U16.pack_into(data, field, checksum)
        VNET.pack_into(data, 0, 0, GSO_NONE, 0, 0, 0, 0)
    bit = random.randrange(4, 8 * (len(data) - VNET_BYTES))
    data[VNET_BYTES + bit // 8] ^= 0x80 >> bit % 8
    return bytes(data)


def ones_sum(data: bytes | bytearray | memoryview) -> int:
    """Ones' complement sum of big-endian 16-bit words (RFC 1071), folded; odd lengths are padded with zero."""
    value = int.from_bytes(data, "big")
    if len(data) & 1:
        value <<= 8
    # 2^16 = 1 (mod 65535): the remainder is the folded sum, except that a non-zero sum never folds to zero.
    return value % 0xFFFF or (0xFFFF if value else 0)


def pseudo_header_sum(head: bytes | bytearray, transport_bytes: int) -> int:
    """Sum that Linux leaves in the checksum field of a CHECKSUM_PARTIAL packet: addresses, protocol, length."""
    ip = VNET_BYTES
    addresses = int.from_bytes(head[ip + 12 : ip + 20], "big")
    total = addresses + head[ip + 9] + transport_bytes
    return total % 0xFFFF or 0xFFFF
