"""`pddbed doctor`: what it says agrees with what this machine does, and it changes nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.doctor.examination import Examination, limited, missing, ok
from tests.conftest import ROOT, run_pddbed


def states(output: str) -> dict[str, str]:
    return {finding["name"]: finding["state"] for finding in json.loads(output)["findings"]}


@pytest.mark.root
def test_doctor_knows_the_driver_that_this_kernel_can_do() -> None:
    result = run_pddbed("doctor", "--json")
    examination = json.loads(result.stdout)
    trial = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    has_netem = subprocess.run(trial, capture_output=True, check=False).returncode == 0
    assert states(result.stdout)["netem driver"] == ("ok" if has_netem else "limited")
    assert examination["wan_driver"] == ("netem" if has_netem else "userspace")
    assert examination["can_raise_lab"]
    assert result.returncode == 0


@pytest.mark.root
def test_doctor_says_in_words_what_it_found_and_what_comes_next() -> None:
    result = run_pddbed("doctor")
    assert result.stderr == ""
    assert "WAN driver: auto means" in result.stdout
    assert "This machine can raise labs" in result.stdout


@pytest.mark.root
def test_a_missing_tool_is_named_with_its_package_and_the_status_is_1(tmp_path: Path) -> None:
    for tool in ("unshare", "bash", "ip"):
        found = shutil.which(tool)
        assert found
        (tmp_path / tool).symlink_to(found)
    result = run_pddbed("doctor", env={**os.environ, "PATH": str(tmp_path)})
    assert result.returncode == 1
    assert "apt-get install --no-install-recommends mininet" in result.stdout
    assert "This machine cannot raise labs yet; see: mnexec." in result.stdout


@pytest.mark.root
def test_an_ordinary_user_is_told_what_is_refused_and_why() -> None:
    """As nobody: whatever user namespaces allow here, every problem comes with a next step, and nothing crashes.

    The interpreter may live below /root, so nobody gets the one capability to read what lies there.
    """
    reading = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *reading]
    program = [sys.executable, "-c", "from testbed.cli import main; main(prog_name='pddbed')", "doctor", "--json"]
    environment = {**os.environ, "HOME": "/nonexistent"}
    result = subprocess.run(
        [*nobody, *program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.stderr == ""
    examination = json.loads(result.stdout)
    assert result.returncode == (0 if examination["can_raise_lab"] else 1)
    assert all(finding["next_step"] for finding in examination["findings"] if finding["state"] != "ok")
    assert states(result.stdout)["CPU quotas"] == "limited"
    assert "not root" in examination["findings"][0]["detail"]


@pytest.mark.root
def test_doctor_leaves_no_interface_behind() -> None:
    before = sorted(Path("/sys/class/net").iterdir())
    run_pddbed("doctor")
    assert sorted(Path("/sys/class/net").iterdir()) == before


@pytest.mark.parametrize(
    ("findings", "driver", "verdict"),
    [
        ((ok("a", ""), limited("b", "", "x")), "userspace", True),
        ((ok("a", ""),), None, False),
        ((ok("a", ""), missing("b", "", "x")), "netem", False),
    ],
)
def test_a_lab_needs_a_driver_and_nothing_missing(findings: tuple, driver: str | None, verdict: bool) -> None:  # type: ignore[type-arg]
    assert Examination(findings, driver, "why").can_raise_lab is verdict
