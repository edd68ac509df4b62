"""`pddbed capture` in a real lab: what is recorded, how it ends, and what it says when it cannot."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.inet import ICMP, IP, TCP
from scapy.utils import rdpcap

from testbed.capture import pcapng
from testbed.lab.record import find_record
from tests.conftest import ROOT, Lab, run_pddbed
from tests.testbed.capture.conftest import packets, raised

pytestmark = pytest.mark.root
LAB = "capture-test"
ONE_WAY_S = 0.020


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with raised(LAB, "--no-workers") as lab:
        yield lab


def _ping(lab: Lab, count: int = 5) -> None:
    lab.ping_rtts_ms("p0", "md0", count=count, interval_s=0.02)


def _bulk(lab: Lab, seconds: float = 1) -> "subprocess.CompletedProcess[str]":
    """TCP from p0 to md0 at the link's rate."""
    assert lab.exec("md0", "iperf3", "-s", "-1", "-D", "--logfile", "/dev/null").returncode == 0
    deadline = time.monotonic() + 5
    while lab.exec("md0", "sh", "-c", "ss -Hltn sport = 5201 | grep -q .").returncode:
        assert time.monotonic() < deadline
    return lab.exec("p0", "iperf3", "-c", "10.2.0.2", "-t", str(seconds))


def test_a_link_is_recorded_where_each_direction_leaves(lab: Lab, start_capture: Any, tmp_path: Path) -> None:
    file = tmp_path / "x.pcapng"
    capture = start_capture(LAB, "wan0", "-w", str(file))
    _ping(lab)
    capture.interrupt()
    result = capture.result()
    assert result.returncode == 0, result.stderr
    recorded = [p for p in rdpcap(str(file)) if ICMP in p and p[IP].src in ("10.1.0.3", "10.2.0.2")]
    requests = {p[ICMP].seq: p for p in recorded if p[ICMP].type == 8}
    replies = {p[ICMP].seq: p for p in recorded if p[ICMP].type == 0}
    assert len(requests) == len(replies) == 5
    assert len(recorded) == 10, "each packet once"
    for number, request in requests.items():
        reply = replies[number]
        assert (request.sniffed_on, request.direction) == ("wan0 main > remote", 2)
        assert (reply.sniffed_on, reply.direction) == ("wan0 remote > main", 2)
        # one clock: the request leaves main, the reply leaves remote one way later
        assert ONE_WAY_S <= float(reply.time - request.time) < ONE_WAY_S + 0.005
    stamps = [float(line.split()[0]) for line in packets(file)]
    assert stamps == sorted(stamps)
    nanoseconds = {line.split()[0].partition(".")[2] for line in packets(file)}
    assert any(not stamp.endswith("000") for stamp in nanoseconds), "microsecond stamps"


def test_at_one_end_both_directions_pass(lab: Lab, start_capture: Any, tmp_path: Path) -> None:
    file = tmp_path / "x.pcapng"
    capture = start_capture(LAB, "wan0", "--at", "main", "-w", str(file))
    _ping(lab)
    capture.interrupt()
    assert capture.result().returncode == 0
    recorded = [p for p in rdpcap(str(file)) if ICMP in p]
    times = {(p[ICMP].type, p[ICMP].seq): float(p.time) for p in recorded}
    assert {p.direction for p in recorded if p[ICMP].type == 8} == {2}
    assert {p.direction for p in recorded if p[ICMP].type == 0} == {1}
    assert all(times[0, number] - times[8, number] >= 2 * ONE_WAY_S for number in range(1, 6))


def test_a_host_is_recorded_at_its_interface(lab: Lab, start_capture: Any, tmp_path: Path) -> None:
    file = tmp_path / "x.pcapng"
    capture = start_capture(LAB, "md0", "-w", str(file))
    _ping(lab)
    capture.interrupt()
    assert capture.result().returncode == 0
    recorded = [p for p in rdpcap(str(file)) if ICMP in p]
    assert [(p[ICMP].type, p.direction) for p in recorded] == [(8, 1), (0, 2)] * 5


def test_headers_only_keeps_up_with_the_link_and_keeps_no_payload(lab: Lab, start_capture: Any, tmp_path: Path) -> None:
    file = tmp_path / "x.pcapng"
    capture = start_capture(LAB, "wan0", "--headers-only", "-w", str(file), "--json")
    assert _bulk(lab).returncode == 0
    capture.interrupt()
    result = capture.result()
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["dropped"] == 0
    recorded = rdpcap(str(file))
    assert all(len(p.original) == 4 * (p[IP].ihl + p[TCP].dataofs) for p in recorded if TCP in p)
    payload = sum(p[IP].len - 4 * (p[IP].ihl + p[TCP].dataofs) for p in recorded if TCP in p)
    assert payload > 20e6, "400 Mbit/s for a second is about 48 MB"
    assert file.stat().st_size < payload / 20
    assert max(p.wirelen for p in recorded) > 3 * 1500, "super-packets are recorded as they pass"


def test_snaplen_duration_and_count(lab: Lab, start_capture: Any, tmp_path: Path) -> None:
    file = tmp_path / "x.pcapng"
    began = time.monotonic()
    capture = start_capture(LAB, "wan0", "--snaplen", "40", "--duration", "1500ms", "-w", str(file))
    _ping(lab)
    assert capture.result().returncode == 0
    assert 1.5 <= time.monotonic() - began < 5
    assert {len(p) for p in rdpcap(str(file))} == {40}
    assert {p.wirelen for p in rdpcap(str(file))} == {84}
    capture = start_capture(LAB, "wan0", "--count", "3", "-f", "-w", str(file))
    _ping(lab)
    assert capture.result().returncode == 0
    assert len(packets(file)) == 3


def test_packets_that_were_dropped_are_told_and_fail(lab: Lab, start_capture: Any, tmp_path: Path) -> None:
    file = tmp_path / "x.pcapng"
    for options, status in (((), 1), (("--allow-drops",), 0)):
        capture = start_capture(LAB, "wan0", "--ring", "4MiB", "-f", "-w", str(file), "--json", *options)
        recorder = capture.recorder()
        recorder.suspend()
        assert _bulk(lab).returncode == 0
        recorder.resume()
        capture.interrupt()
        result = capture.result()
        assert result.returncode == status, result.stderr
        account = json.loads(result.stdout)
        assert account["dropped"] > 0
        assert (b"packets are missing from" in result.stderr) == bool(status)
        statistics = pcapng.read_statistics(file)
        assert sum(entry.dropped for entry in statistics) == account["dropped"]
        kept = sum(entry.received - entry.dropped for entry in statistics)
        assert kept - 1 <= account["packets"] <= kept, "one may arrive between the end and the count"
        assert len(packets(file)) == account["packets"]


def test_standard_output_feeds_another_program(lab: Lab, start_capture: Any, tmp_path: Path) -> None:
    capture = start_capture(LAB, "wan0", "--count", "4", "-w", "-")
    _ping(lab)
    result = capture.result()
    assert result.returncode == 0, result.stderr
    file = tmp_path / "x.pcapng"
    file.write_bytes(result.stdout)
    assert len(packets(file)) == 4


def test_a_full_disk_is_one_sentence_and_a_readable_file(lab: Lab, tmp_path: Path) -> None:
    # the small disk is mounted in a namespace of the capture's own, so nothing can be left of it
    script = (
        f"mount -t tmpfs -o size=256k tmpfs {tmp_path} && "
        f"{{ pddbed capture wan0 -l {LAB} -w {tmp_path}/x.pcapng --duration 20s; echo status $?; "
        f"tcpdump -n -r {tmp_path}/x.pcapng | wc -l; }}"
    )
    pddbed = ROOT / ".venv" / "bin"
    environment = {**os.environ, "PATH": f"{pddbed}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("capturing")
    assert _bulk(lab).returncode == 0
    out, err = process.communicate(timeout=30)
    assert "status 1" in out
    assert "no space left on the disk" in err
    assert "Traceback" not in err
    assert int(out.split()[-1]) > 5, "the packets until then"
    assert "truncated" not in err


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["wan9", "-w", "x"], 1, 'no WAN link or host "wan9" in this lab; links: wan0; hosts: gw0, p0, rld0, md0'),
        (["wan0", "-w", "x", "--at", "nowhere"], 1, "its ends are main and remote"),
        (["md0", "-w", "x", "--at", "main"], 1, "leave it out"),
        (["wan0", "-w", "missing/x"], 1, "cannot write missing/x: No such file or directory"),
        (["wan0", "-w", "there"], 1, "there exists; choose another name, or -f"),
        (["wan0", "-w", "x", "--headers-only", "--snaplen", "9"], 2, "exclude each other"),
        (["wan0", "-w", "x", "--duration", "5"], 2, "unit"),
        (["wan0", "-w", "x", "--ring", "1MiB"], 2, "from 4MiB"),
        (["wan0", "-w", "x", "--count", "0"], 2, "x>=1"),
        (["wan0"], 2, "-w"),
    ],
)
def test_what_cannot_be_captured_is_said_in_a_sentence(
    lab: Lab, tmp_path: Path, arguments: list[str], status: int, says: str
) -> None:
    (tmp_path / "there").write_text("precious")
    if "-w" in arguments:
        place = arguments.index("-w") + 1
        arguments = [*arguments[:place], str(tmp_path / arguments[place]), *arguments[place + 1 :]]
        says = re.sub(r"(?<!\S)(missing/x|there)", lambda match: str(tmp_path / match[0]), says)
    result = run_pddbed("capture", "-l", LAB, *arguments)
    assert result.returncode == status, result.stderr
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["there"], "no empty file is left"
    assert (tmp_path / "there").read_text() == "precious"


def test_without_a_lab_or_with_a_dead_one_there_is_nothing_to_capture(tmp_path: Path) -> None:
    result = run_pddbed("capture", "-l", "capture-no-such-lab", "wan0", "-w", str(tmp_path / "x"))
    assert result.returncode == 1
    assert 'no lab "capture-no-such-lab" is up' in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_dead_link_and_a_dead_lab_end_a_capture(start_capture: Any, tmp_path: Path) -> None:
    with raised("capture-dead", "--no-workers") as lab:
        _check_dead_link(lab, start_capture, tmp_path / "link.pcapng")
        _check_dead_lab(lab, start_capture, tmp_path / "lab.pcapng")


def _check_dead_link(lab: Lab, start_capture: Any, file: Path) -> None:
    capture = start_capture(lab.name, "wan0", "-w", str(file))
    _ping(lab)
    capture.until_recorded(file, 1500)
    killed = lab.exec("wan0", "sh", "-c", "kill -9 $(pgrep -f '[t]estbed.links.emulator')")
    assert killed.returncode == 0, killed.stderr
    result = capture.result()
    assert result.returncode == 1
    assert b"the interface went away" in result.stderr
    assert len(packets(file, "icmp")) == 10
    assert len(pcapng.read_statistics(file)) == 2
    refused = run_pddbed("capture", "-l", lab.name, "wan0", "-w", f"{file}.2")
    assert refused.returncode == 1
    assert "interface wan0 does not exist" in refused.stderr
    assert not Path(f"{file}.2").exists()


def _check_dead_lab(lab: Lab, start_capture: Any, file: Path) -> None:
    """However the lab dies: the file is readable, and nothing keeps the lab's network alive."""
    capture = start_capture(lab.name, "md0", "-w", str(file))
    lab.exec("gw0", "ping", "-c", "2", "-i", "0.1", "10.2.0.2")
    namespace = _link(Path(f"/proc/{capture.recorder().pid}/ns/net"))
    guardian = find_record(lab.name).guardian_pid()
    assert guardian is not None
    os.kill(guardian, signal.SIGKILL)
    result = capture.result()
    assert result.returncode == 1
    assert b"went away during the capture" in result.stderr
    packets(file)
    assert not [path for path in Path("/proc").glob("[0-9]*/ns/net") if _link(path) == namespace]


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
