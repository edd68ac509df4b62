"""A machine of a test's own, as far as labs and processes go: new PID and mount namespaces with an empty /run.

A program in it can neither see nor signal what runs outside, whatever it does.
"""

import subprocess
import sys

from testbed.machine.programs import environment
from tests.conftest import ROOT

ENTER = 'mount --make-rprivate /; mount -t tmpfs none /run; exec "$@"'


def run_apart(
    program: str, timeout_s: float = 60, own_network: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python program there, as PID 1's child; its output is captured. `own_network`: with no interface but lo."""
    command = [
        "unshare",
        *["--net"] * own_network,
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "sh",
        "-c",
        ENTER,
        "sh",
    ]
    return subprocess.run(
        [*command, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env=environment() | variables,
    )
