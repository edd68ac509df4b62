"""A run of atheris over seeds in a directory that is gone afterwards."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris


def guide(write_seeds: Callable[[Path], None], target: Callable[[bytes], object], *flags: str) -> None:
    """Fuzz `target`, and end this process with the run's status. `flags` are libFuzzer's.

    `atheris.Fuzz` ends its process without any cleaning up, so that is a child, and the directory the parent's.
    """
    with tempfile.TemporaryDirectory(prefix="pddbed-fuzz-") as corpus:
        write_seeds(Path(corpus))
        child = os.fork()
        if not child:
            atheris.Setup([sys.argv[0], *flags, corpus], target)
            atheris.Fuzz()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(code if code >= 0 else 128 - code)
