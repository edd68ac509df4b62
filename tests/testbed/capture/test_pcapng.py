"""The file format: what other programs read in what `capture` writes."""

import io
import subprocess
from pathlib import Path

import pytest
from scapy.layers.inet import ICMP
from scapy.utils import RawPcapNgReader, rdpcap

from testbed.capture import pcapng
from testbed.capture.context import Context, LabHost, Passage

# an ICMP echo request, 10.1.0.2 > 10.2.0.2, of 28 bytes
PING = bytes.fromhex("4500001c00010000400164da0a0100020a0200020800f7fd00010001")
TIME_NS = 1_795_988_775_468_463_607


def _blocks(comment: str = "{}") -> list[bytes]:
    return [
        pcapng.section_block(comment),
        pcapng.interface_block("wan0 main > remote", "leaving router.main", pcapng.LINKTYPE_IPV4, 0),
        pcapng.interface_block("wan0 remote > main", "leaving router.remote", pcapng.LINKTYPE_IPV4, 0),
        pcapng.packet_block(0, TIME_NS, PING, len(PING), pcapng.OUTBOUND),
        pcapng.packet_block(1, TIME_NS + 1, PING[:21], len(PING), pcapng.INBOUND),
        pcapng.statistics_block(pcapng.Statistics(0, TIME_NS - 5, TIME_NS + 5, 12, 3)),
        pcapng.statistics_block(pcapng.Statistics(1, TIME_NS - 5, TIME_NS + 5, 1, 0)),
    ]


def test_scapy_reads_names_directions_lengths_and_nanoseconds(tmp_path: Path) -> None:
    file = tmp_path / "x.pcapng"
    file.write_bytes(b"".join(_blocks()))
    with RawPcapNgReader(str(file)) as reader:
        (first, about), (second, about_second) = reader._read_packet(), reader._read_packet()
    assert (first, second) == (PING, PING[:21])
    assert (about.tshigh << 32 | about.tslow, about.tsresol) == (TIME_NS, 10**9)
    assert (about.ifname, about.direction, about.wirelen) == (b"wan0 main > remote", 2, 28)
    assert (about_second.ifname, about_second.direction, about_second.wirelen) == (b"wan0 remote > main", 1, 28)
    packet = rdpcap(str(file))[0]
    assert packet[ICMP].type == 8
    assert packet.dst == "10.2.0.2"


def test_tcpdump_reads_both_interfaces(tmp_path: Path) -> None:
    file = tmp_path / "x.pcapng"
    file.write_bytes(b"".join(_blocks()))
    result = subprocess.run(
        ["tcpdump", "-n", "--nano", "-tt", "-r", str(file)], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[0].startswith("1795988775.468463607 IP 10.1.0.2 > 10.2.0.2: ICMP echo request")
    assert len(result.stdout.splitlines()) == 2, result.stdout


def test_the_account_at_the_end_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "x.pcapng"
    file.write_bytes(b"".join(_blocks()))
    assert pcapng.read_statistics(file) == [
        pcapng.Statistics(0, TIME_NS - 5, TIME_NS + 5, 12, 3),
        pcapng.Statistics(1, TIME_NS - 5, TIME_NS + 5, 1, 0),
    ]
    file.write_bytes(b"".join(_blocks()[:-2]))
    assert pcapng.read_statistics(file) == []


@pytest.mark.parametrize("hosts", [1, 2000])  # the comment of a large lab does not fit into one option
def test_a_context_survives_in_the_files_comment(tmp_path: Path, hosts: int) -> None:
    context = Context(
        lab="t",
        started=12.5,
        point="wan0",
        host=None,
        hosts=tuple(
            LabHost(f"h\N{LATIN SMALL LETTER E WITH ACUTE}{n}", "main", "10.1.0.2", 7000) for n in range(hosts)
        ),
        passages=(Passage("main", "remote", "main > remote", 0, 20_000_000),),
        interfaces=(("main > remote", ""), ("remote > main", "")),
        begun_ns=TIME_NS,
    )
    file = tmp_path / "x.pcapng"
    file.write_bytes(b"".join(_blocks(context.to_comment())))
    assert Context.from_comment(pcapng.read_comment(file)) == context
    assert len(rdpcap(str(file))) == 2


def test_files_of_others_carry_no_context(tmp_path: Path) -> None:
    file = tmp_path / "x.pcapng"
    file.write_bytes(b"".join(_blocks("a comment of somebody else's")))
    assert Context.from_comment(pcapng.read_comment(file)) is None
    file.write_bytes(b"\xd4\xc3\xb2\xa1" + bytes(40))
    assert pcapng.read_comment(file) is None


def test_a_torn_file_is_cut_after_its_last_whole_block() -> None:
    blocks = _blocks()
    whole = b"".join(blocks[:4])
    for torn in range(1, len(blocks[4])):
        assert pcapng.end_of_whole_blocks(io.BytesIO(whole + blocks[4][:torn])) == len(whole)
    assert pcapng.end_of_whole_blocks(io.BytesIO(whole), len(blocks[0])) == len(whole)
