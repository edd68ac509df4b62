"""Machinery of all benchmarks: programs that they run, and the figures and tables that they leave (`--out`)."""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def add_option(parser: argparse.ArgumentParser) -> None:
    """`--out`, for `write`."""
    words = "write the figures as JSON, and the table, where there is one, beside it as .txt"
    parser.add_argument("--out", type=Path, metavar="FILE", help=words)


def write(file: Path | None, figures: object, lines: Sequence[str] = ()) -> None:
    """Nothing without a file."""
    if file is None:
        return
    file.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    if lines:
        file.with_suffix(".txt").write_text("\n".join(lines) + "\n")


PACKAGES = {
    "brctl": "bridge-utils",
    "ip": "iproute2",
    "iperf3": "iperf3",
    "mnexec": "mininet",
    "sysctl": "procps",
    "unshare": "util-linux",
}
PDDBED = [sys.executable, "-c", "from testbed.cli import main; main(prog_name='pddbed')"]


def require(*programs: str) -> None:
    """End with a sentence that names every program that is missing, and how to get it."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        packages = " ".join(sorted({PACKAGES[name] for name in missing}))
        sys.exit(f"this benchmark runs {', '.join(missing)}, which this machine lacks: apt-get install {packages}")


def output(command: list[str]) -> str:
    """Return what a command prints; exit with what it said on standard error when it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()
        sys.exit(f"{' '.join(command[-3:])} failed with status {done.returncode}: {said[-1]}")
    return done.stdout


def pddbed(*arguments: str) -> str:
    """Return what a pddbed command prints, like `output`."""
    return output([*PDDBED, *arguments])
