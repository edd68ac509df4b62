"""Whatever ends a run ends all of it: daemons that nobody waits for, mounts, its user."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.vagrant import machine
from testbed.vagrant.machine import NAME
from tests.conftest import ROOT

pytestmark = pytest.mark.root
PROGRAM = "import sys; from testbed.vagrant import sandbox; sys.exit(sandbox.run('tests.testbed.vagrant.sleeper', sys.argv[1:]))"  # fmt: skip # noqa: E501


def state() -> dict[str, set[str]]:
    """As `host_state`; of processes only those that a sleeper starts, since other runs may be going on."""
    found = machine.host_state()
    return found | {"processes": {name for name in found["processes"] if name.endswith("sleep")}}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = state()
    yield
    deadline = time.monotonic() + 20
    while (left := machine.additions(before, state())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_run_has_an_ordinary_user_and_its_status_comes_back(tmp_path: Path) -> None:
    process = start(str(tmp_path), "7")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 7
    assert said.split() == [NAME, "2"]  # PID 1 is the reaper
    assert (tmp_path / "home" / "written").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    before = state()
    process = start(str(tmp_path))
    try:
        assert process.stdout is not None
        assert process.stdout.readline().split()[0] == NAME
        deadline = time.monotonic() + 20  # what was forked is called sleep once it has become that
        while not (running := machine.additions(before, state())) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(running) == 1, running  # no interface, mount or user of the machine's own
        assert "sleep" in running[0]
        process.send_signal(number)
        assert process.wait(timeout=30) == (-9 if number == signal.SIGKILL else 128 + number)
    finally:
        process.kill()
    if number != signal.SIGKILL:  # the run has ended when its command has
        assert not machine.additions(before, state())
