"""A test of time that fails is a failure, unless the machine itself stood still; a test of behaviour always is."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.inconclusive import Inconclusive

TESTS = """
import pytest

@pytest.mark.quiet
def test_of_time():
    assert 2 < 1

def test_of_behaviour():
    assert 2 < 1
"""
STALL = """
import time
import tests.inconclusive as inconclusive

inconclusive.Inconclusive.evidence = lambda self, *times: "1 stall of the machine, the longest 300 ms"
"""


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nmarkers = quiet")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return pytester


def test_without_evidence_both_fail(session: pytest.Pytester) -> None:
    session.runpytest_subprocess("-p", "tests.inconclusive").assert_outcomes(failed=2)


def test_with_evidence_the_test_of_time_is_inconclusive_and_told_in_full(session: pytest.Pytester) -> None:
    session.makeconftest(STALL)
    result = session.runpytest_subprocess("-p", "tests.inconclusive", "-rs")
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*inconclusive: *test_of_time*", "1 stall*", "*assert 2 < 1*"])


def test_more_than_a_few_are_a_failure_of_the_run(session: pytest.Pytester) -> None:
    session.makeconftest(STALL)
    many = "".join(f"\n@pytest.mark.quiet\ndef test_{n}():\n    assert 2 < 1\n" for n in range(3))
    session.makepyfile("import pytest\n" + many)
    assert session.runpytest_subprocess("-p", "tests.inconclusive").ret == pytest.ExitCode.TESTS_FAILED


def test_a_stalled_machine_is_seen(tmp_path: Path) -> None:
    """A process of real-time priority that was stopped cannot tell this from a machine that stood still."""
    watch = Inconclusive(tmp_path / "stalls")
    try:
        time.sleep(0.5)
        begin = time.monotonic()
        os.kill(watch._watch.pid, signal.SIGSTOP)
        time.sleep(0.2)
        os.kill(watch._watch.pid, signal.SIGCONT)
        time.sleep(0.1)
        seen = watch.evidence(begin, time.monotonic(), 1e9)
    finally:
        watch.close()
    if os.geteuid() == 0:
        assert seen is not None
        assert "stall" in seen
