"""The built network does what the file says: delay, rate, names, routes, side-by-side labs."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, Lab, run_pddbed

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("leaves_nothing")]
TOPOLOGIES = ROOT / "topologies"
MTU = 1500
TCP_PAYLOAD = MTU - 52  # IPv4 20, TCP 20, timestamps 12


@pytest.mark.quiet
def test_ping_across_the_wan_shows_the_files_delay(raise_lab: Callable[..., Lab]) -> None:
    lab = raise_lab(TOPOLOGIES / "two-dc-tiny.yaml", "delay", "--no-workers")
    rtts = lab.ping_rtts_ms("gw0", "md0", count=40)
    # the file's delay is one-way
    assert abs(statistics.median(rtts) / 2 - 20) < 0.5, rtts
    assert min(rtts) >= 40, "a link must never be faster than its file"


@pytest.mark.quiet
def test_iperf3_across_the_wan_shows_the_files_rate(raise_lab: Callable[..., Lab]) -> None:
    lab = raise_lab(TOPOLOGIES / "two-dc-tiny.yaml", "rate", "--no-workers")
    script = "iperf3 -s -1 -D --logfile /dev/null"
    assert lab.exec("md0", "sh", "-c", script).returncode == 0
    result = lab.exec("p0", "iperf3", "-c", "md0", "-t", "6", "-O", "2", "-J")
    report = json.loads(result.stdout)
    assert "error" not in report, report
    payload_bps = report["end"]["sum_received"]["bits_per_second"]
    rate_bps = payload_bps * MTU / TCP_PAYLOAD
    assert rate_bps == pytest.approx(400e6, rel=0.05)


def test_hosts_are_reachable_under_the_names_that_a_person_types(raise_lab: Callable[..., Lab], tmp_path: Path) -> None:
    file = tmp_path / "names.yaml"
    file.write_text(
        """\
name: names
datacenters:
  main:
    subnet: 10.1.0.0/24
    hosts: {SW_SUPERVISOR_1: {}, verylongname1: {}, verylongname2: {}, "edge-1.rack:2": {}}
  remote:
    subnet: 10.2.0.0/24
    hosts: {very-long-name-that-exceeds-fifteen: {}}
wan:
  - {name: a-link-with-a-long-name, between: [main, remote], rate: 100mbit, delay: 1ms}
"""
    )
    lab = raise_lab(file, "names", "--no-workers")
    names = [host["name"] for host in lab.status()["hosts"]]
    assert names == [
        "SW_SUPERVISOR_1",
        "verylongname1",
        "verylongname2",
        "edge-1.rack:2",
        "very-long-name-that-exceeds-fifteen",
    ]
    for name in names:
        result = lab.exec("verylongname1", "ping", "-n", "-c", "1", "-W", "5", name)
        assert result.returncode == 0, f"{name}: {result.stdout}{result.stderr}"
    interfaces = lab.exec("verylongname1", "ls", "/sys/class/net").stdout.split()
    assert all(len(name) <= 15 for name in interfaces)


def test_two_labs_from_one_file_run_side_by_side(raise_lab: Callable[..., Lab]) -> None:
    first = raise_lab(TOPOLOGIES / "two-dc-tiny.yaml", "first", "--no-workers")
    second = raise_lab(TOPOLOGIES / "two-dc-tiny.yaml", "second", "--no-workers")
    for lab in (first, second):
        assert min(lab.ping_rtts_ms("p0", "md0", count=3)) >= 40
    result = run_pddbed("status")
    assert result.returncode == 1
    assert "first, second" in result.stderr


def test_three_datacenters_route_over_the_cheapest_links(raise_lab: Callable[..., Lab]) -> None:
    lab = raise_lab(TOPOLOGIES / "three-dc.yaml", "three", "--no-workers")
    status = lab.status()
    hosts = {host["datacenter"]: host["name"] for host in status["hosts"]}
    names = list(hosts.values())
    for target in names[1:]:
        assert lab.exec(names[0], "ping", "-n", "-c", "1", "-W", "5", target).returncode == 0


@pytest.mark.nightly
def test_no_small_packet_is_lost_through_a_long_delay(raise_lab: Callable[..., Lab], tmp_path: Path) -> None:
    """600 small requests a second, 1 s one-way: comparable tools drop at a default limit of 1000 packets."""
    file = tmp_path / "long.yaml"
    file.write_text(
        """\
name: long
datacenters:
  main: {subnet: 10.1.0.0/24, hosts: {a: {}}}
  remote: {subnet: 10.2.0.0/24, hosts: {b: {}}}
wan:
  - {name: wan0, between: [main, remote], rate: 100mbit, delay: 1000ms}
"""
    )
    lab = raise_lab(file, "long", "--no-workers", "--no-verify")
    assert lab.exec("b", "iperf3", "-s", "-1", "-D", "--logfile", "/dev/null").returncode == 0
    payload, each_second, seconds = 64, 600, 5
    rate = str(each_second * payload * 8)
    result = lab.exec("a", "iperf3", "-c", "b", "-u", "-l", str(payload), "-b", rate, "-t", str(seconds), "-J")
    received = json.loads(result.stdout)["end"]["sum_received"]
    assert received["packets"] > 0.9 * each_second * seconds
    assert received["lost_packets"] == 0
    (link,) = lab.status()["links"]
    assert all(link["counters"][way]["dropped_unasked"] == 0 for way in ("forward", "backward"))


def test_exec_returns_the_commands_own_status_and_streams(raise_lab: Callable[..., Lab]) -> None:
    lab = raise_lab(TOPOLOGIES / "two-dc-tiny.yaml", "status", "--no-workers")
    result = lab.exec("md0", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (result.returncode, result.stdout, result.stderr) == (7, "out\n", "err\n")
    assert lab.exec("md0", "sh", "-c", "kill -9 $$").returncode == 128 + 9
    assert lab.exec("md0", "no-such-command").returncode == 127
    missing = lab.exec("nowhere", "true")
    assert missing.returncode == 1
    assert 'no host "nowhere"' in missing.stderr
    assert "md0" in missing.stderr
