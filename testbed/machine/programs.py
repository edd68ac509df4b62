"""Programs: those of this machine, and this project's own modules, the same whatever directory the caller is in.

`python -m` looks in the working directory first: a json.py or a workers/ there would be taken for the real one.
"""

import os
import shutil
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])  # where the packages are
SBIN = ("/usr/sbin", "/sbin")  # not on every user's PATH, though the programs run without root


def program(module: str) -> list[str]:
    """The command that runs `module` with this interpreter, without the working directory on its path."""
    return [sys.executable, "-P", "-m", module]


def environment() -> dict[str, str]:
    """This process's environment, in which the project's packages are found even where they are not installed."""
    found = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, *filter(None, [found])])}


def find_tool(name: str) -> str | None:
    """Absolute path of a program, also when it lives in sbin and PATH lacks that."""
    found = shutil.which(name)
    if found is None:
        found = next((f"{directory}/{name}" for directory in SBIN if Path(directory, name).exists()), None)
    return found
