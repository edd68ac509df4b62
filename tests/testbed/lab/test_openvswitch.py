"""`switch: ovs`: a lab on Open vSwitch where the kernel has it, a refusal with the next step where it has not.

`make vagrant-test` runs this in its VM, which has the module.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.lab.openvswitch import openvswitch_problem
from testbed.topology.overlay import Value, laid_over
from tests.conftest import ROOT, Lab, run_pddbed

pytestmark = pytest.mark.root
PROBLEM = openvswitch_problem()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Open vSwitch in both datacenters, with jumbo frames."""
    overlay: dict[str, Value] = {"wan.wan0.rate": "10mbit"}
    for name in ("main", "remote"):
        overlay |= {f"datacenters.{name}.switch": "ovs", f"datacenters.{name}.fabric": {"mtu": 9000}}
    path = tmp_path / "ovs.yaml"
    path.write_text(laid_over(ROOT / "topologies" / "two-dc-tiny.yaml", overlay))
    return path


@pytest.mark.skipif(PROBLEM is None, reason="this machine has Open vSwitch")
def test_without_open_vswitch_it_is_refused_before_anything_is_built(file: Path, leaves_nothing: None) -> None:
    assert run_pddbed("validate", str(file)).returncode == 0
    result = run_pddbed("up", str(file), "--name", "ovs", "--no-workers")
    assert result.returncode == 1
    assert f'datacenter "main": switch ovs: {PROBLEM}; or write linux-bridge' in result.stderr


@pytest.mark.skipif(PROBLEM is not None, reason=f"no Open vSwitch here: {PROBLEM}")
def test_a_lab_forwards_through_open_vswitch_and_leaves_nothing(
    leaves_nothing: None, file: Path, raise_lab: Callable[..., Lab]
) -> None:
    lab = raise_lab(file, "ovs", "--no-workers", "--no-verify")
    inside = lab.exec("gw0", "ping", "-n", "-c", "3", "-M", "do", "-s", "8000", "p0")
    assert inside.returncode == 0, inside.stdout + inside.stderr
    assert min(lab.ping_rtts_ms("gw0", "md0", count=5)) >= 40
    assert run_pddbed("down", "ovs").returncode == 0
