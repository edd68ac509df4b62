"""One suite for both drivers: netem where the kernel has it (in the VM), else userspace."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.links import kernel

sys.path.insert(0, str(Path(__file__).parent))  # `line` beside this file


@pytest.fixture(scope="session")
def line() -> Iterator["Line"]:  # noqa: F821
    """One built link for all tests: under emulation a build takes seconds, a change of its values milliseconds."""
    from line import Line

    driver, _ = kernel.automatic_driver()
    assert driver is not None
    with Line(driver) as built:
        yield built


@pytest.fixture(autouse=True)
def clear(line: "Line") -> None:  # noqa: F821
    """Every test starts from an unimpaired line."""
    line.set()
