"""tbf as this kernel has it: what is installed is read back, over the whole range, and another tool agrees."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from testbed.links import qdisc
from testbed.links.rig import namespace
from testbed.links.shaping import wide_open
from testbed.links.tc_messages import open_netlink

MTU = 1500
pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def pid() -> Iterator[int]:
    with namespace() as pid, open_netlink(pid) as netlink:
        netlink.link("add", ifname="one", kind="veth", peer={"ifname": "two"})
        yield pid


@pytest.mark.parametrize("rate", [125, 1_250, 125_001, 187_500_000, 536_870_912, 5_120_000_000, 12_500_000_000])
def test_every_rate_is_read_back_as_it_was_set(pid: int, rate: int) -> None:
    asked = qdisc.Tbf(rate, burst_bytes=1514 + rate // 1000, limit_bytes=qdisc.U32_MAX - 7, mtu=MTU)
    with open_netlink(pid) as netlink:
        index = netlink.link_lookup(ifname="one")[0]
        qdisc.install(netlink, index, asked, MTU, qdisc.installed(netlink, index, MTU) is not None)
        got = qdisc.installed(netlink, index, MTU)
    assert got is not None
    assert qdisc.differences(asked, got.settings) == []
    assert got.charges_ip_bytes


def test_a_difference_is_named() -> None:
    asked = qdisc.Tbf(1000, 1514, 5000, MTU)
    assert qdisc.differences(asked, replace(asked, rate_bytes_per_s=999)) == ["rate_bytes_per_s: 1000, 999"]
    assert qdisc.differences(asked, replace(asked, burst_bytes=1600)) == ["burst_bytes: 1514, 1600"]
    assert qdisc.differences(asked, None) == ["qdisc: tbf, None"]
    netem = qdisc.Netem(latency_ns=5, limit_packets=9, rate_bytes_per_s=1, seed=4)
    assert qdisc.differences(netem, replace(netem, seed=None)) == []  # an old kernel
    assert qdisc.differences(replace(netem, seed=None), netem) == []  # the kernel chose one
    assert qdisc.differences(netem, replace(netem, seed=5)) == ["seed: 4, 5"]
    assert len(qdisc.differences(netem, asked)) == 1


def test_tc_reads_the_same_rate_and_wide_open_is_wide(pid: int) -> None:
    with open_netlink(pid) as netlink:
        index = netlink.link_lookup(ifname="one")[0]
        for settings in (qdisc.Tbf(1_250_000, 1514, 30_000, MTU), wide_open(MTU)):
            qdisc.install(netlink, index, settings, MTU, qdisc.installed(netlink, index, MTU) is not None)
            command = ["nsenter", f"--net=/proc/{pid}/ns/net", "tc", "-j", "qdisc", "show", "dev", "one"]
            shown = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)[0]
            assert shown["kind"] == "tbf"
            assert shown["options"]["rate"] == settings.rate_bytes_per_s
