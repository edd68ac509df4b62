"""The probes say the truth about this kernel and leave nothing."""

import subprocess
from pathlib import Path
from typing import Literal

import pytest

from testbed.links import kernel


def _interfaces() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


@pytest.mark.root
def test_the_probe_agrees_with_tc_and_leaves_nothing() -> None:
    here = Path("/proc/thread-self/ns/net").readlink()
    interfaces = _interfaces()
    by_tc = subprocess.run(
        ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"], capture_output=True
    )
    problem = kernel.netem_problem()
    assert (problem is None) == (by_tc.returncode == 0)
    if problem is not None:
        assert problem == "this kernel has no sch_netem"
    assert Path("/proc/thread-self/ns/net").readlink() == here
    assert _interfaces() == interfaces
    qdiscs = subprocess.run(["tc", "qdisc", "show", "dev", "lo"], capture_output=True, text=True, check=True)
    assert "netem" not in qdiscs.stdout


@pytest.mark.root
@pytest.mark.parametrize("kind", ["netem", "tbf"])
def test_the_unprivileged_probe_agrees_with_the_privileged_one(kind: Literal["netem", "tbf"]) -> None:
    if not kernel.user_namespaces_work():
        pytest.skip("user namespaces are not allowed here")
    assert kernel._without_root(kind) == kernel.qdisc_problem(kind)


def test_the_automatic_driver_is_one_that_works() -> None:
    driver, reason = kernel.automatic_driver()
    works = {"netem": kernel.netem_problem(), "userspace": kernel.tun_problem()}
    assert driver is None or works[driver] is None
    assert reason
