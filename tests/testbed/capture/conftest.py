"""Labs and running captures for the tests of this folder."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import ROOT, Lab, run_pddbed

TINY = ROOT / "topologies" / "two-dc-tiny.yaml"


class RunningCapture:
    """`pddbed capture` in a process group of its own, as a shell would start it; recording when this is made."""

    def __init__(self, lab: str, *arguments: str) -> None:
        command = [sys.executable, "-c", "from testbed.cli import main; main(prog_name='pddbed')", "capture"]
        self.process = subprocess.Popen(
            [*command, "--lab", lab, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
        assert self.process.stderr is not None
        self.said = self.process.stderr.readline().decode()
        assert self.said.startswith("capturing"), self.said + self.process.stderr.read().decode()

    def recorder(self) -> psutil.Process:
        """The process inside the lab."""
        return psutil.Process(self.process.pid).children(recursive=True)[-1]

    def interrupt(self) -> None:
        """Ctrl-C: the terminal sends the signal to the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def result(self, timeout_s: float = 30) -> subprocess.CompletedProcess[bytes]:
        out, err = self.process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess([], self.process.returncode, out, err)

    def until_recorded(self, file: Path, size: int, within_s: float = 10) -> None:
        """Wait until the file has grown to `size` bytes."""
        deadline = time.monotonic() + within_s
        while file.stat().st_size < size:
            assert time.monotonic() < deadline, f"{file} did not grow to {size} bytes"
            select.select([], [], [], 0.02)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def raised(name: str, *options: str) -> Iterator[Lab]:
    """A lab of the tiny topology, down afterwards."""
    result = run_pddbed("up", str(TINY), "--name", name, "--api", "auto", *options)
    assert result.returncode == 0, result.stderr
    try:
        yield Lab(name)
    finally:
        run_pddbed("down", name)


def packets(file: Path, expression: str = "") -> list[str]:
    """What tcpdump says of each packet; fails where it complains."""
    command = ["tcpdump", "-n", "--nano", "-tt", "-r", str(file), *expression.split()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "truncated" not in result.stderr, result.stderr
    return result.stdout.splitlines()


@pytest.fixture
def start_capture() -> Iterator[Any]:
    """`start_capture(lab_name, *arguments) -> RunningCapture`; ended after the test, whatever happened."""
    captures: list[RunningCapture] = []

    def start(lab: str, *arguments: str) -> RunningCapture:
        captures.append(RunningCapture(lab, *arguments))
        return captures[-1]

    yield start
    for capture in captures:
        capture.stop()


def audited(file: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """`pddbed audit --json`: its status and what it printed."""
    result = run_pddbed("audit", str(file), "--json", *options)
    assert result.stdout, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return result.returncode, answer
