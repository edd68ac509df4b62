"""How many hosts a datacenter may have, told by `validate` and true of the kernel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.lab import cgroups
from testbed.topology import TopologyErrors
from testbed.topology.checks.hosts import SWITCH_PORTS
from testbed.topology.load import plan_from_text

FILL = """
from pyroute2 import IPRoute
with IPRoute() as ip:
    ip.link("add", ifname="bridge", kind="bridge")
    bridge = ip.link_lookup(ifname="bridge")[0]
    for number in range({most} + 1):
        ip.link("add", ifname=f"a{{number}}", kind="veth", peer={{"ifname": f"b{{number}}"}})
        try:
            ip.link("set", index=ip.link_lookup(ifname=f"a{{number}}")[0], master=bridge)
        except Exception as error:
            print(number, error.code)
"""


def with_hosts(count: int, switch: str) -> str:
    hosts = ", ".join(f"h{number}: {{}}" for number in range(count))
    return f"datacenters: {{main: {{subnet: 10.1.0.0/16, switch: {switch}, hosts: {{{hosts}}}}}}}"


def test_as_many_hosts_as_the_bridge_has_ports_for_and_not_one_more() -> None:
    most = SWITCH_PORTS["linux-bridge"] - 1  # the border router has one
    assert len(plan_from_text(with_hosts(most, "linux-bridge"), "lab.yaml").hosts) == most
    with pytest.raises(TopologyErrors, match=r"1,023 hosts are more than the 1,022 .* or write switch: ovs") as caught:
        plan_from_text(with_hosts(most + 1, "linux-bridge"), "lab.yaml")
    assert [problem.path for problem in caught.value.problems] == ["datacenters.main.hosts"]
    assert len(plan_from_text(with_hosts(most + 1, "ovs"), "lab.yaml").hosts) == most + 1


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it makes interfaces in a network namespace of its own")
def test_the_kernels_bridge_has_that_many_ports() -> None:
    program = FILL.format(most=SWITCH_PORTS["linux-bridge"])
    done = subprocess.run(["unshare", "--net", sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == f"{SWITCH_PORTS['linux-bridge']} 54\n", done.stderr  # EXFULL


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or cgroups.quota_problem() is not None, reason="no cpu cgroups that one can make")
@pytest.mark.parametrize("lab", ["tasks", "lab-of-test_limits", "cgroup.procs"])
def test_names_of_the_kernels_own_files_are_free_for_labs_and_hosts_with_a_quota(lab: str) -> None:
    found = cgroups.cpu_controller()
    assert found is not None
    (found[0] / "pddbed").mkdir(exist_ok=True)
    of_kernel = [path.name for path in (found[0] / "pddbed").iterdir() if path.is_file()]
    names = [*of_kernel, "tasks", "cgroup.procs", "cpu.max", "cpu.cfs_quota_us", "a.b", "a:b", "a-b", "A-b", "x" * 63]
    try:
        made = [cgroups.create(lab, name, 0.5) for name in dict.fromkeys(names)]
        assert len(set(made)) == len(set(names))
        assert all(Path(directory).is_dir() for directory in made)
    finally:
        cgroups.remove_lab(lab)
    assert not any(directory.exists() for directory in made)
