"""Needs a kernel with netem: in the VM (tests/testbed/vm/test_netem_suite.py starts it), or on such a machine."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.links import kernel

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))  # `line`

if kernel.netem_problem() is not None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def netem_line() -> Iterator["Line"]:  # noqa: F821
    """One built netem link for all tests that need nothing else."""
    from line import Line

    with Line("netem") as built:
        yield built
