"""A run that only waits: run inside the sandbox by test_sandbox.py. Argument: the run's directory."""

import os
import subprocess
import sys
from pathlib import Path

from testbed.vagrant import sandbox


def main() -> int:
    guest = sandbox.furnish(Path(sys.argv[1]), None)
    # As libvirt's daemon does: a session of its own, and nobody waits for it.
    command = ["setsid", "--fork", "sleep", "600"]
    subprocess.run(command, user=guest.uid, group=guest.uid, extra_groups=[], check=True)
    name = subprocess.run(["id", "-un"], user=guest.uid, group=guest.uid, capture_output=True, text=True, check=True)
    subprocess.run(["touch", "/mnt/home/written"], user=guest.uid, group=guest.uid, check=True)
    print(f"{name.stdout.strip()} {os.getpid()}", flush=True)
    if len(sys.argv) > 2:
        return int(sys.argv[2])
    subprocess.run(["sleep", "600"])
    return 0


if __name__ == "__main__":
    sandbox.become_init(main)
