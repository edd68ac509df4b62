"""Fixtures that make the real thing: labs raised by the real command, and a check that nothing of them is left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"  # data beside the checkout; tests that need it say so when it is absent
pytest_plugins = ["tests.inconclusive", "tests.programs", "pytester"]


# A shell's background jobs ignore SIGINT, those of nohup SIGHUP, and so would every command that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Hypothesis's deadline and "too slow" measure the load of this machine, not the code. In CI the examples are the same
# in every run of the same code; elsewhere they are new ones each time, and what they find becomes an @example.
settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("patient")


@pytest.hookimpl(tryfirst=True)  # before those of other lanes are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The files that take longest go first, so that at the end nothing waits for one of them alone.
    long = {item.path for item in items if item.get_closest_marker("nightly")}
    items.sort(key=lambda item: (not item.get_closest_marker("vm"), item.path not in long))
    if os.geteuid() == 0:
        return
    skip = pytest.mark.skip(reason="needs root: it makes namespaces and TUN devices with real-time priority")
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(skip)


def run_pddbed(*arguments: str, timeout_s: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """The `pddbed` command of this checkout, output captured."""
    if arguments[:1] == ("up",) and "--name" in arguments:
        _named.append(arguments[arguments.index("--name") + 1])
    command = [sys.executable, "-c", "from testbed.cli import main; main(prog_name='pddbed')", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, **options)


_named: list[str] = []
"""Every lab that `run_pddbed` was told to raise."""


@pytest.fixture(autouse=True)
def _no_lab_outlives_its_test() -> Iterator[None]:
    """Ends what a test that failed has left up, so that the tests after it do not fail for that."""
    before = len(_named)  # labs of a module's fixtures are there already
    yield
    for name in _named[before:]:
        if Path("/run/pddbed", name).exists():
            run_pddbed("down", name)


class Lab:
    """A running lab, driven through the command line."""

    def __init__(self, name: str) -> None:
        self.name = name

    def exec(self, host: str, *command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return run_pddbed("exec", "-l", self.name, host, "--", *command, timeout_s=timeout_s)

    def status(self) -> dict[str, Any]:
        result = run_pddbed("status", "-l", self.name, "--json")
        assert result.returncode == 0, result.stderr
        status: dict[str, Any] = json.loads(result.stdout)
        return status

    def ping_rtts_ms(self, host: str, target: str, count: int = 20, interval_s: float = 0.05) -> list[float]:
        """Round-trip times of `count` pings, in ms."""
        result = self.exec(host, "ping", "-n", "-c", str(count), "-i", str(interval_s), target)
        assert result.returncode == 0, result.stdout + result.stderr
        return [float(word[5:]) for word in result.stdout.split() if word.startswith("time=")]


@pytest.fixture
def raise_lab() -> Iterator[Callable[..., Lab]]:
    """`raise_lab(file, name, *options) -> Lab`; every lab raised is down after the test."""
    names: list[str] = []

    def start(file: Path | str, name: str, *options: str) -> Lab:
        names.append(name)
        result = run_pddbed("up", str(file), "--name", name, "--api", "auto", *options)
        assert result.returncode == 0, result.stderr
        return Lab(name)

    yield start
    for name in names:
        run_pddbed("down", name)


def traces_of_labs() -> dict[str, set[str]]:
    """What a lab leaves on a machine when it leaks: processes, interfaces, mounts, cgroups, records."""
    cgroups = Path("/sys/fs/cgroup").glob("**/pddbed/lab-*")
    return {
        "guardians": {str(path) for path in Path("/proc").glob("[0-9]*") if _comm(path) == "pddbed-guard"},
        "interfaces": {path.name for path in Path("/sys/class/net").iterdir()},
        "PID namespaces": _namespaces("pid"),  # every process of a lab but its guardian lives in the lab's own
        "network namespaces": _namespaces("net"),
        "mounts": {line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "pddbed" in line},
        # cgroups are the machine's: those of tests that run beside these are theirs
        "cgroups": {str(path) for path in cgroups if path.name.removeprefix("lab-") in _named},
        "records": {str(path) for path in Path("/run/pddbed").glob("*") if path.is_dir()},
    }


def _comm(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return ""


def _namespaces(kind: str) -> set[str]:
    """Namespaces that some process lives in."""
    found = set()
    for path in Path("/proc").glob(f"[0-9]*/ns/{kind}"):
        try:
            found.add(str(path.readlink()))
        except OSError:
            continue
    return found


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Fails the test when, after it, something of a lab is left that was not there before."""
    before = traces_of_labs()
    yield
    deadline = time.monotonic() + 5  # the kernel removes a namespace's devices in the background
    while True:
        left = {kind: now - before[kind] for kind, now in traces_of_labs().items() if now - before[kind]}
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not left, f"left behind: {left}"
