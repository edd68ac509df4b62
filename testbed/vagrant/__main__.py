"""`make vagrant-test`: boot the shipped Vagrantfile, run the lab in it, leave nothing but the cached box.

Status 0: everything passed; 1: something failed, in one sentence; 130: interrupted, and nothing is left.
"""

import argparse
import fcntl
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from testbed.machine import owned
from testbed.vagrant import machine, sandbox
from testbed.vagrant.machine import VagrantError

SETTLE_S = 10  # the kernel ends processes and mounts of a killed namespace in the background


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m testbed.vagrant", description=__doc__)
    parser.add_argument("--port", type=int, default=int(os.environ.get("PDDBED_VM_PORT", "8000")))
    parser.add_argument("--results", type=Path, default=Path("out/vagrant"), help="where the VM's results go")
    parser.add_argument("--box-only", action="store_true", help="build the box, if need be, and no more")
    options = parser.parse_args()
    try:
        return run(options.port, options.results, options.box_only)
    except VagrantError as error:
        print(f"vagrant-test: {error}", file=sys.stderr)
        return 1


def run(port: int, results: Path, box_only: bool) -> int:
    """One run; its exit status. Raises VagrantError before anything is started."""
    if os.geteuid() != 0:
        raise VagrantError("building the box and its namespaces needs root; run: sudo make vagrant-test")
    machine.require_port(port)
    machine.require_tools()
    cache = cache_directory()
    with only_one(cache):
        sweep(cache)
        before = machine.host_state()
        work = Path(tempfile.mkdtemp(prefix="run-", dir=cache))
        work.chmod(0o755)
        owned.mark(work, sandbox.KIND)
        try:
            arguments = [str(cache), str(work), str(port)] + ["--box-only"] * box_only
            status = sandbox.run("testbed.vagrant.run", arguments)
            if (work / "results").is_dir():
                shutil.copytree(work / "results", results, dirs_exist_ok=True)
        finally:
            sandbox.remove(work)
        left = additions_after_settling(before)
    if left:
        print(f"vagrant-test: this was left on the machine, or came meanwhile: {'; '.join(left)}", file=sys.stderr)
        return status or 1
    print("nothing is left on this machine but the cached box: no process, interface, firewall rule, mount or user")
    return status


def cache_directory() -> Path:
    """`pddbed/vagrant` below $PDDBED_CACHE or /var/cache; made when it is not there. Raises VagrantError."""
    cache = owned.cache_directory("vagrant")
    try:
        owned.make_cache(cache)
    except OSError as error:
        raise VagrantError(
            f"the cache {cache} cannot be made ({error.strerror}); set PDDBED_CACHE to another directory"
        ) from error
    return cache


class only_one:
    """One run at a time in a cache: the next would take the first one's directory for a leftover."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def __enter__(self) -> None:
        self._lock = os.open(self._cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise VagrantError(f"another run is using {self._cache}; wait until it has ended") from error

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)


def sweep(cache: Path) -> None:
    """Remove what a run left here that was killed with its parent."""
    for directory in owned.ours(cache, sandbox.KIND):
        sandbox.remove(directory)


def additions_after_settling(before: dict[str, set[str]]) -> list[str]:
    """Things that are new on the host, once they have had the time to go."""
    deadline = time.monotonic() + SETTLE_S
    while (left := machine.additions(before, machine.host_state())) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


if __name__ == "__main__":
    sys.exit(main())
