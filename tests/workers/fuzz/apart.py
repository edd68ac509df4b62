"""Processes whose peak memory is their own.

Linux counts into a process's `ru_maxrss`, which libFuzzer limits, what its parent held when it forked: here a pytest
that may have loaded a model of half a gigabyte. So a small shell stands in between.
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_apart(
    command: Sequence[str], cwd: Path, env: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a command, output captured as text."""
    shell = ["/bin/sh", "-c", '"$@"; exit $?', "sh", *command]
    return subprocess.run(shell, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s)
