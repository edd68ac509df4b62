"""Super-packets are measured and cut exactly as a network card would segment them. No root needed."""

import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.links.emulator.packet import VNET, VNET_BYTES, Malformed, NotIPv4, Packet, ones_sum
from tests.testbed.links import packets


def joined(frame: object) -> bytes:
    return frame if isinstance(frame, bytes) else b"".join(frame)  # type: ignore[arg-type]


@st.composite
def super_packets(draw: st.DrawFn) -> bytes:
    mss = draw(st.integers(1, 1460))
    payload = os.urandom(draw(st.integers(mss + 1, min(mss * 45, 64000))))
    return packets.super_packet(
        payload,
        mss,
        sequence=draw(st.integers(0, 2**32 - 1)),
        flags=draw(st.integers(0, 255)) & ~packets.SYN,
        ident=draw(st.integers(0, 65535)),
        tcp_options=bytes(draw(st.sampled_from([0, 12, 40]))),
        ip_options=bytes(draw(st.sampled_from([0, 4, 40]))),
    )


@given(super_packets(), st.data())
def test_the_pieces_of_a_super_packet_are_byte_for_byte_its_segments(data: bytes, choose: st.DataObject) -> None:
    packet = Packet(data)
    whole = packets.finished(data)
    assert packet.segments == len(whole)
    assert packet.ip_bytes == sum(map(len, whole))
    cuts = choose.draw(st.sets(st.integers(1, packet.segments - 1), max_size=6))
    bounds = [0, *sorted(cuts), packet.segments]
    got: list[bytes] = []
    for first, last in pairwise(bounds):
        piece = joined(packet.cut(first, last))
        assert packet.bytes_of(first, last) == sum(map(len, whole[first:last]))
        assert (piece[1] == 0) == (last - first == 1)
        got += packets.finished(piece)
    assert got == whole


@given(super_packets(), st.integers(0, 80_000))
def test_segments_within_fills_the_room_and_not_more(data: bytes, room: int) -> None:
    packet = Packet(data)
    fit = packet.segments_within(room)
    assert packet.bytes_of(0, fit) <= room or fit == 0
    assert fit == packet.segments or packet.bytes_of(0, fit + 1) > room


@given(st.binary(max_size=200))
def test_the_ones_complement_sum_equals_the_sum_word_by_word(data: bytes) -> None:
    assert ones_sum(data) == ~packets.checksum(data) & 0xFFFF


def test_a_piece_of_several_segments_keeps_the_congestion_mark_only_when_it_is_the_first() -> None:
    packet = Packet(packets.super_packet(bytes(6000), 1000, flags=packets.CWR | packets.ACK))
    assert joined(packet.cut(0, 3))[1] == 0x81
    assert joined(packet.cut(3, 6))[1] == 0x01
    assert joined(packet.cut(3, 4))[1] == 0


def test_a_packet_without_offload_is_one_segment_and_passes_untouched() -> None:
    data = packets.plain(packets.ipv4(b"x" * 100, 17))
    packet = Packet(data)
    assert (packet.segments, packet.ip_bytes) == (1, 120)
    assert packet.cut(0, 1) is data


def test_what_is_not_ipv4_is_told_apart_from_what_is_broken() -> None:
    with pytest.raises(NotIPv4):
        Packet(packets.plain(b"\x60" + bytes(59)))
    for data in (b"", bytes(VNET_BYTES), packets.plain(b"\x45" + bytes(10))):
        with pytest.raises(Malformed):
            Packet(data)


GOOD = packets.super_packet(bytes(5000), 1000)


@pytest.mark.parametrize(
    "header",
    [
        (1, 1, 40, 0, 20, 16),  # segments of zero bytes
        (0, 1, 40, 1000, 20, 16),  # segmentation without checksum offload
        (1, 1, 40, 1000, 24, 16),  # not where the IP header ends
        (1, 1, 40, 1000, 60000, 16),
        (1, 1, 40, 1000, 20, 6),
        (1, 3, 40, 1000, 20, 6),  # UDP fragmentation, never offered
        (1, 4, 40, 1000, 20, 16),  # TCP over IPv6, never offered
    ],
)
def test_a_super_packet_whose_header_contradicts_it_is_malformed(header: tuple[int, ...]) -> None:
    with pytest.raises(Malformed):
        Packet(VNET.pack(*header) + GOOD[VNET_BYTES:])


@given(st.binary(min_size=0, max_size=120), st.integers(0, 255))
def test_no_bytes_whatever_raise_anything_but_the_two_named_errors(tail: bytes, gso_type: int) -> None:
    data = bytes([1, gso_type]) + tail
    try:
        packet = Packet(data)
    except (Malformed, NotIPv4):
        return
    for first in range(packet.segments):
        joined(packet.cut(first, first + 1))
