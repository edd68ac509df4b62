"""One cluster for all tests whose faults it survives: they heal it before they end."""

from collections.abc import Iterator

import pytest

from tests.workers.failures.rig import Rig


@pytest.fixture(scope="package")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One of each role, one-shot hand-over, and little room for what a client does not read."""
    with Rig(tmp_path_factory.mktemp("rig"), {"handoff": "one-shot"}, send_buffer=8 << 10) as running:
        yield running
        running.check_books()
