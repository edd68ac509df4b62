"""A fabric that its file limits, and what is said of one that it does not."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testbed.lab.fabric import limiter
from testbed.links import kernel
from tests.conftest import Lab, run_pddbed

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("leaves_nothing")]
MTU, HEADERS = 9000, 52
RATE_BPS = 100_000_000
LAB = """\
name: fabric
datacenters:
  main:
    subnet: 10.1.0.0/24
    fabric: {rate: 100mbit}
    hosts: {a: {}, b: {}, c: {}}
  remote:
    subnet: 10.2.0.0/24
    hosts: {d: {}}
wan:
  - {name: wan0, between: [main, remote], rate: 50mbit, delay: 1ms}
"""


@pytest.fixture
def lab(raise_lab: Callable[..., Lab], tmp_path: Path) -> Lab:
    file = tmp_path / "fabric.yaml"
    file.write_text(LAB)
    return raise_lab(file, "fabric", "--no-workers")


def serve(lab: Lab, host: str, port: int) -> None:
    done = lab.exec(host, "sh", "-c", f"iperf3 -s -1 -D -p {port} --logfile /dev/null")
    assert done.returncode == 0, done.stderr


def received_bps(output: str) -> float:
    report = json.loads(output)
    assert "error" not in report, report
    return float(report["end"]["sum_received"]["bits_per_second"]) * MTU / (MTU - HEADERS)


def test_a_host_sends_and_receives_at_most_the_fabrics_rate(lab: Lab) -> None:
    serve(lab, "b", 5201)
    one = lab.exec("a", "iperf3", "-c", "b", "-t", "3", "-O", "1", "-J")
    assert 0.9 * RATE_BPS < received_bps(one.stdout) < 1.02 * RATE_BPS
    with ThreadPoolExecutor(2) as pool:
        both = []
        for port, host in ((5201, "a"), (5202, "c")):
            serve(lab, "b", port)
            words = ("iperf3", "-c", "b", "-p", str(port), "-t", "8", "-J")
            both.append(pool.submit(lab.exec, host, *words))
        time.sleep(3)
        received = lab.exec(
            "b", "sh", "-c", "for n in 1 2; do sleep 2; date +%s%N; cat /sys/class/net/eth0/statistics/rx_bytes; done"
        )
    assert all(received_bps(one.result().stdout) > 0 for one in both)
    begin_ns, before, end_ns, after = map(int, received.stdout.split())
    assert 0.9 * RATE_BPS < (after - before) * 8e9 / (end_ns - begin_ns) < 1.1 * RATE_BPS, (
        "two share what one receiver takes"
    )


@pytest.mark.nightly
def test_verify_reports_what_each_fabric_gives_and_judges_none(lab: Lab) -> None:
    result = run_pddbed("verify", "--lab", lab.name, "--json")
    found = {fabric["datacenter"]: fabric for fabric in json.loads(result.stdout)["fabrics"]}
    assert found["main"]["between"] == ["a", "b"]
    assert found["remote"]["between"] == ["d", "router.remote"]
    for fabric in found.values():
        delay, rate = fabric["figures"]
        assert 0 < delay["measured"] < 20e6
        assert not delay["judged"]
        assert not rate["judged"]
    limited, free = (found[name]["figures"][1] for name in ("main", "remote"))
    assert limited["asked"] == RATE_BPS
    assert limited["measured"] < 1.05 * RATE_BPS
    assert free["asked"] is None
    assert free["measured"] > 5 * RATE_BPS
    table = run_pddbed("verify", "--lab", lab.name, "--quick").stdout
    assert "fabric" not in table, "not in the quick form"


@pytest.mark.skipif(kernel.qdisc_problem("netem") is None, reason="this kernel has sch_netem; tests/vm tries it out")
def test_a_fabric_delay_is_refused_where_the_kernel_has_no_netem(tmp_path: Path) -> None:
    file = tmp_path / "delay.yaml"
    file.write_text(LAB.replace("{rate: 100mbit}", "{delay: 1ms}"))
    result = run_pddbed("up", str(file), "--no-workers")
    assert result.returncode == 1
    assert (
        'datacenter "main": fabric.delay: this kernel has no sch_netem; leave it out, or use a kernel' in result.stderr
    )


@pytest.mark.parametrize("mtu", [576, 1500, 9000, 65_535])
@pytest.mark.parametrize("rate_bps", [1_000, 1_000_000, 100_000_000_000, 10**13])
def test_every_rate_that_a_file_may_ask_for_fits_the_kernels_numbers_or_is_refused(rate_bps: int, mtu: int) -> None:
    if (rate_bps, mtu) == (1_000, 65_535):
        with pytest.raises(ValueError, match="raise its rate or lower its mtu"):
            limiter(rate_bps, mtu)
        return
    tbf = limiter(rate_bps, mtu)
    assert tbf.rate_bytes_per_s * 8 >= rate_bps
    assert tbf.burst_bytes > mtu
    assert max(tbf.burst_bytes, tbf.limit_bytes, tbf.burst_bytes * 10**9 // tbf.rate_bytes_per_s // 64) < 2**32
