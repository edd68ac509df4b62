"""A test that fails with its lab up leaves none for the tests after it."""

from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.root
FAILS = """
import pytest
from tests.conftest import ROOT, run_pddbed, _no_lab_outlives_its_test

def test_that_fails_before_it_takes_its_lab_down():
    file = str(ROOT / "topologies" / "two-dc-tiny.yaml")
    assert run_pddbed("up", file, "--name", "left-up", "--no-workers", "--no-verify").returncode == 0
    raise AssertionError
"""


def test_a_lab_of_a_failed_test_is_down(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(FAILS)
    pytester.runpytest_subprocess().assert_outcomes(failed=1)
    assert not Path("/run/pddbed/left-up").exists()
