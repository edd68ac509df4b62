"""The chaos of `benchmarks/chaos.py` over a lab, in its short form."""

from pathlib import Path

import pytest

from benchmarks.chaos import verdict
from benchmarks.chaos_lab import over_a_lab

pytestmark = [pytest.mark.root, pytest.mark.quiet, pytest.mark.usefixtures("leaves_nothing")]


def test_right_requests_are_answered_over_a_lab_that_stalls_and_loses_workers(tmp_path: Path) -> None:
    row = over_a_lab(requests=30, clients=4, seed=3, directory=tmp_path, name="chaos-short")
    print(row)
    assert verdict(row) == []
