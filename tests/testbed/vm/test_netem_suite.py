"""The tests that need a netem kernel, in one boot of the VM and one pytest process; each is reported by name.

All of them in the nightly lane, a sample for every commit. To add tests: append their path to GUEST_TESTS. They run as
root on the VM's kernel, in this project's own environment.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.vm.image import VmImage

PDDBED = Path(sys.executable).with_name("pddbed")
PROJECT = Path(__file__).parents[3]
GUEST_TESTS = ("tests/vm", "tests/conformance")
SAMPLE = (
    "tests/vm/test_netem_link.py",
    "tests/vm/test_lab.py::test_a_ping_between_the_datacenters_takes_the_files_delay",
    "tests/conformance/test_wan_impairments.py::test_independent_loss",
    "tests/conformance/test_wan_link.py::test_a_ping_takes_both_delays",
    "tests/conformance/test_wan_link.py::test_tcp_gets_the_rate_minus_its_headers",
    "tests/conformance/test_wan_link.py::test_what_is_done_is_exactly_what_was_asked_or_it_is_refused",
)
GUEST_TIMEOUT_S = 900
# Plugins that are not needed take seconds to import under emulation.
GUEST_PYTEST = ("python", "-m", "pytest", "-p", "pytest_timeout", "-p", "no:cacheprovider", "-q", "--tb=short")


Guest = Callable[[tuple[str, ...]], None]


@pytest.fixture
def guest(image: VmImage, tmp_path: Path, subtests: pytest.Subtests, capfd: pytest.CaptureFixture[str]) -> Guest:
    """Run tests in the VM; each is a subtest here, and what it measured is printed."""
    return lambda tests: _run(tests, tmp_path, subtests, capfd)


@pytest.mark.vm
@pytest.mark.timeout(GUEST_TIMEOUT_S + 60)
def test_a_sample_of_what_needs_netem_passes_in_the_vm(guest: Guest) -> None:
    guest(SAMPLE)


@pytest.mark.nightly
@pytest.mark.vm
@pytest.mark.timeout(GUEST_TIMEOUT_S + 60)
def test_everything_that_needs_netem_passes_in_the_vm(guest: Guest) -> None:
    guest(GUEST_TESTS)


def _run(tests: tuple[str, ...], tmp_path: Path, subtests: pytest.Subtests, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--timeout", str(GUEST_TIMEOUT_S), "--output", str(tmp_path), "--env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    command = (*GUEST_PYTEST, "-o", "junit_family=xunit1", "--junitxml=/job/out/results.xml", *tests)
    # To the guest, every moment that QEMU waits for a CPU is a moment in which nothing moves: it goes first.
    first = ("nice", "-n", "-10") if os.geteuid() == 0 else ()
    run = subprocess.run(
        [*first, PDDBED, "vm", "run", *options, "--", *command],
        cwd=PROJECT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    results = tmp_path / "results.xml"
    assert results.exists(), f"status {run.returncode}, and no result from the VM:\n{run.stdout[-5000:]}"
    cases = list(ElementTree.parse(results).iter("testcase"))
    assert cases, run.stdout
    with capfd.disabled():
        print(f"\nin the VM: {run.stdout.strip().splitlines()[-1]}")
        for case in cases:
            measured = ", ".join(f"{one.get('name')} {_short(one.get('value', ''))}" for one in case.iter("property"))
            if measured:
                print(f"  {case.get('name')}: {measured}")
    for case in cases:
        with subtests.test(msg=f"{case.get('classname')}::{case.get('name')}"):
            for outcome in (*case.iter("failure"), *case.iter("error")):
                pytest.fail(f"in the VM: {outcome.get('message')}\n{outcome.text}", pytrace=False)
    assert run.returncode == 0, run.stdout[-5000:]


def _short(value: str) -> str:
    try:
        return f"{float(value):.4g}"
    except ValueError:
        return value
