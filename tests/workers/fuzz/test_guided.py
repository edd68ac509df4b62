"""The coverage-guided fuzzers in short: seconds here, for as long as one likes by hand (guided.py says how)."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.workers.fuzz.apart import run_apart

RUNS = 600


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this machine")
@pytest.mark.parametrize("target", ["dissect", "messages", "transfers", "tails", "control", "handshake_script"])
def test_no_crash_no_hang_no_growth(target: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.workers.fuzz.guided", target, f"-runs={RUNS}", "-max_total_time=2"]
    run = run_apart(command, tmp_path, {"PYTHONPATH": str(ROOT)}, 120)
    found = [path.read_bytes()[:300] for path in tmp_path.iterdir()]
    assert run.returncode == 0, f"{found}\n{run.stderr[-3000:]}"
    assert "Done " in run.stderr
    covered = int(run.stderr.rpartition("cov: ")[2].split()[0])
    assert covered > 20, "the fuzzer sees no branches: it guides nothing"
