"""Needs a kernel with netem: in the VM (tests/testbed/vm/test_netem_suite.py starts it), or on such a machine."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.links import kernel

sys.path.insert(0, str(Path(__file__).parent))  # `line` beside this file

if kernel.netem_problem() is not None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def line() -> Iterator["Line"]:  # noqa: F821
    """One built link for all tests: a lab takes seconds to build here, a change of its values milliseconds."""
    from line import Line

    with Line() as built:
        yield built


@pytest.fixture(autouse=True)
def clear(request: pytest.FixtureRequest) -> None:
    """Every test of the line starts from an unimpaired one."""
    if "line" in request.fixturenames:
        request.getfixturevalue("line").set()
