"""CASES.md names tests that exist."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_case_has_its_test() -> None:
    named = re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", (HERE / "CASES.md").read_text())
    rows = [line for line in (HERE / "CASES.md").read_text().splitlines() if line.startswith("| ")]
    assert len(named) >= len(rows) - 3, "a row without a test"
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (HERE / file).read_text()]
    assert not missing
