"""Packets as a TUN device hands them over, and an independent, plain segmentation to compare with."""

import ipaddress
import struct

from testbed.links.emulator.packet import VNET

FIN, SYN, PSH, ACK, CWR = 0x01, 0x02, 0x08, 0x10, 0x80


def checksum(data: bytes) -> int:
    """RFC 1071, word by word."""
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def pseudo_header(source: bytes, destination: bytes, protocol: int, length: int) -> bytes:
    return source + destination + struct.pack(">BBH", 0, protocol, length)


def ipv4(payload: bytes, protocol: int, ident: int = 1, options: bytes = b"") -> bytes:
    header_bytes = 20 + len(options)
    source, destination = ipaddress.IPv4Address("10.91.0.2").packed, ipaddress.IPv4Address("10.92.0.2").packed
    head = struct.pack(
        ">BBHHHBBH4s4s",
        0x40 | header_bytes // 4,
        0,
        header_bytes + len(payload),
        ident,
        0x4000,
        63,
        protocol,
        0,
        source,
        destination,
    )
    head += options
    return head[:10] + struct.pack(">H", checksum(head)) + head[12:] + payload


def tcp(payload: bytes, sequence: int, flags: int, options: bytes = b"") -> bytes:
    """A TCP segment whose checksum field is still zero."""
    head = struct.pack(">HHIIBBHHH", 40000, 5201, sequence, 77, (20 + len(options)) // 4 << 4, flags, 512, 0, 0)
    return head + options + payload


def plain(packet: bytes) -> bytes:
    """A packet without offload work."""
    return VNET.pack(0, 0, 0, 0, 0, 0) + packet


def super_packet(
    payload: bytes,
    mss: int,
    sequence: int = 1,
    flags: int = ACK,
    ident: int = 1,
    tcp_options: bytes = b"",
    ip_options: bytes = b"",
) -> bytes:
    """A TSO packet: the checksum field holds the folded pseudo-header sum, as the kernel leaves it."""
    segment = bytearray(tcp(payload, sequence, flags, tcp_options))
    packet = bytearray(ipv4(bytes(segment), 6, ident, ip_options))
    start = 20 + len(ip_options)
    partial = ~checksum(pseudo_header(packet[12:16], packet[16:20], 6, len(segment))) & 0xFFFF
    packet[start + 16 : start + 18] = struct.pack(">H", partial)
    headers = start + 20 + len(tcp_options)
    gso_type = 1 | (0x80 if flags & CWR else 0)
    return VNET.pack(1, gso_type, headers, mss, start, 16) + bytes(packet)


def finished(data: bytes) -> list[bytes]:
    """What leaves a network card for `data`: MTU segments with every checksum finished (RFC 791, 9293; the
    flags and the IP id as in Linux's tcp_gso_segment and inet_gso_segment).
    """
    flags, gso_type, _, mss, start, offset = VNET.unpack_from(data)
    packet = data[VNET.size :]
    if gso_type == 0:
        return [_finish(packet, start, offset)] if flags & 1 else [packet]
    tcp_bytes = packet[start + 12] >> 4 << 2
    ip_head, tcp_head = packet[:start], packet[start : start + tcp_bytes]
    payload = packet[start + tcp_bytes :]
    pieces = [payload[i : i + mss] for i in range(0, len(payload), mss)]
    ident, sequence = struct.unpack(">H", ip_head[4:6])[0], struct.unpack(">I", tcp_head[4:8])[0]
    out = []
    for number, piece in enumerate(pieces):
        head = bytearray(tcp_head)
        head[4:8] = struct.pack(">I", (sequence + number * mss) % 2**32)
        if number < len(pieces) - 1:
            head[13] &= ~(FIN | PSH)
        if number > 0:
            head[13] &= ~CWR
        ip = bytearray(ip_head)
        ip[2:4] = struct.pack(">H", start + tcp_bytes + len(piece))
        ip[4:6] = struct.pack(">H", (ident + number) % 65536)
        ip[10:12] = b"\0\0"
        ip[10:12] = struct.pack(">H", checksum(bytes(ip)))
        out.append(_finish(bytes(ip + head) + piece, start, 16))
    return out


def _finish(packet: bytes, start: int, offset: int) -> bytes:
    out = bytearray(packet)
    out[start + offset : start + offset + 2] = b"\0\0"
    total = pseudo_header(out[12:16], out[16:20], out[9], len(out) - start) + bytes(out[start:])
    out[start + offset : start + offset + 2] = struct.pack(">H", checksum(total))
    return bytes(out)
