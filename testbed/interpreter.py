"""This project's own modules as programs, the same whatever directory the caller is in.

`python -m` looks in the working directory first: a json.py or a workers/ there would be taken for the real one.
"""

import os
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[1])


def program(module: str) -> list[str]:
    """The command that runs `module` with this interpreter, without the working directory on its path."""
    return [sys.executable, "-P", "-m", module]


def environment() -> dict[str, str]:
    """This process's environment, in which the project's packages are found even where they are not installed."""
    found = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([_ROOT, *filter(None, [found])])}
