"""Benchmarks end in one sentence where a program that they run is not here, or fails."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

RUNNING = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if re.search(r"^    require\(", path.read_text(), re.M)
)


def test_benchmarks_that_run_programs_of_the_machine_are_known() -> None:
    assert {"lab_startup", "links_userspace"} <= set(RUNNING)


@pytest.mark.parametrize("name", RUNNING)
def test_a_missing_program_is_one_sentence_with_its_package(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}"],
        env={"PATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "which this machine lacks: apt-get install" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"), [(["down", "--nonsense"], "No such option"), (["up", "/none"], "no such")]
)
def test_a_command_that_fails_says_why(arguments: list[str], words: str) -> None:
    code = "import sys; from benchmarks.harness import pddbed; pddbed(*sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
