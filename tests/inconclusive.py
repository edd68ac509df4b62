"""A pytest plugin: a test of time (marked `quiet`) that fails while the machine itself stood still is inconclusive.

The evidence is a process of real-time priority that sleeps 5 ms again and again: when it wakes up late by more than
`STALL_MS`, nothing of this machine ran, however little else there was to do; and the CPU time that the hypervisor gave
to others (`steal` of /proc/stat). An inconclusive test is told with its failure in full, and more than `LIMIT` of them
are a failure of the run. Tests of behaviour are never inconclusive, and nothing is run again.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

STALL_MS = 20.0
STEAL_SHARE = 0.02
LIMIT = 2

_WATCH = """
import os, sys, time
try:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
except OSError:
    sys.exit()  # without the right to it, what other processes do would look like a stall
stop = os.getppid()
before = time.monotonic()
while os.getppid() == stop:
    time.sleep(0.005)
    now = time.monotonic()
    if now - before > 0.005 + float(sys.argv[1]) / 1e3:
        print(before, now, flush=True)
    before = now
"""


class Inconclusive:
    """Watches the machine while tests of time run, and judges their failures by what it saw."""

    def __init__(self, log: Path) -> None:
        self.told: list[tuple[str, str, str]] = []
        self._log = log
        with log.open("w") as file:
            self._watch = subprocess.Popen([sys.executable, "-c", _WATCH, str(STALL_MS)], stdout=file)

    def close(self) -> None:
        self._watch.kill()
        self._watch.wait()

    def evidence(self, begin_s: float, end_s: float, stolen_before_s: float) -> str | None:
        """What stood still between two instants of CLOCK_MONOTONIC, in words; None if nothing did."""
        stalls = [
            (float(begin), float(end))
            for begin, end in (line.split() for line in self._log.read_text().splitlines())
            if float(end) > begin_s and float(begin) < end_s
        ]
        stolen = (_stolen_s() - stolen_before_s) / max(end_s - begin_s, 0.1) / (os.cpu_count() or 1)
        found = []
        if stalls:
            longest_ms = max(end - begin for begin, end in stalls) * 1e3
            found.append(f"{len(stalls)} stalls of the machine, the longest {longest_ms:.0f} ms")
        if stolen > STEAL_SHARE:
            found.append(f"{stolen:.0%} of the CPUs' time was given to others")
        return "; ".join(found) or None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        item.stash[_BEGAN] = (time.monotonic(), _stolen_s())
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        if call.when == "call" and report.failed and item.get_closest_marker("quiet"):
            assert call.excinfo is not None
            begin_s, stolen_s = item.stash[_BEGAN]
            seen = self.evidence(begin_s, time.monotonic(), stolen_s)
            if seen is not None and call.excinfo.errisinstance(AssertionError):
                self.told.append((item.nodeid, seen, report.longreprtext))
                report.outcome = "skipped"
                report.longrepr = (str(item.path), item.location[1], f"inconclusive: {seen}")
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, seen, failure in self.told:
            terminalreporter.section(f"inconclusive: {name}")
            terminalreporter.line(f"{seen}; what failed meanwhile:")
            terminalreporter.line(failure)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.close()
        if len(self.told) > LIMIT and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


_BEGAN = pytest.StashKey[tuple[float, float]]()


def _stolen_s() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to watch if there is a test of time among the selected ones."""
    if any(item.get_closest_marker("quiet") for item in session.items) and not session.config.option.collectonly:
        folder = session.config._tmp_path_factory.mktemp("machine")  # type: ignore[attr-defined]
        session.config.pluginmanager.register(Inconclusive(folder / "stalls"), "inconclusive")
