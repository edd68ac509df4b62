"""One run in its sandbox: box, VM, checks, the end. Started by `__main__`; prints as it goes.

python -m testbed.vagrant.run CACHE WORK PORT [--box-only]
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from testbed.machine import owned
from testbed.vagrant import box, checks, machine, sandbox
from testbed.vagrant.checks import Times
from testbed.vagrant.machine import VagrantError
from testbed.vagrant.vagrant import Vagrant

PROJECT = Path(__file__).parents[2]
# One date for every file of the copy: make must find the box's environment newer than the files it was made of.
OLD = 1_600_000_000


def main() -> int:
    cache, work, port = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    try:
        return _run(cache, work, port, box_only="--box-only" in sys.argv[4:])
    except VagrantError as error:
        print(f"vagrant-test: {error}", file=sys.stderr)
        return 1


def _run(cache: Path, work: Path, port: int, box_only: bool) -> int:
    times = Times()
    project = work / "project"
    copy_project(project)
    with times.of("box"):
        found = box.find(cache, project)
        if found is None:
            found = _build(cache, project, work, port)
        else:
            say(f"the box is in the cache: {found.directory}")
    owned.sweep(cache, box.KIND, found.directory)  # boxes that were made of something else
    if box_only:
        return 0
    machine.require_room(cache, machine.RUN_BYTES, "the VM")
    guest = sandbox.furnish(work, found.boxes)
    with times.of("whether KVM works"):
        kvm = machine.boots("kvm", found.kernel, guest)
    say(f"starting the VM {'under KVM' if kvm else 'without KVM, which boots nothing here: its CPU is emulated'}")
    vagrant = Vagrant(guest, port, machine.free_port(), kvm)
    vagrant.prepare()
    sandbox.own(project, guest)
    try:
        return checks.run(vagrant, times, work / "results")
    finally:
        times.print()


def copy_project(target: Path) -> None:
    """The working tree as git sees it: tracked and new files, nothing that is ignored."""
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={PROJECT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT, capture_output=True,
    )  # fmt: skip
    if listed.returncode != 0:
        raise VagrantError(f"{PROJECT} is not a git checkout ({listed.stderr.decode().strip()}); clone the project")
    for name in listed.stdout.decode().split("\0"):
        source, copy = PROJECT / name, target / name
        if not name or not source.is_file():  # deleted, but still in the index
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
        copy.chmod(0o755 if os.access(source, os.X_OK) else 0o644)
        os.utime(copy, (OLD, OLD))


def _build(cache: Path, project: Path, work: Path, port: int) -> box.Box:
    machine.require_room(cache, machine.BUILD_BYTES, "building the box")

    def add(file: Path) -> Path:
        say("adding it to Vagrant")
        adding = work / "adding"
        adding.mkdir()
        guest = sandbox.furnish(adding, None)
        vagrant = Vagrant(guest, port, port, kvm=False)
        vagrant.prepare()
        file.chmod(0o644)
        (sandbox.PLACE / "file").touch()
        subprocess.run(["mount", "--bind", str(file), str(sandbox.PLACE / "file")], check=True)
        boxes = vagrant.add(sandbox.PLACE / "file")
        return adding / boxes.relative_to(sandbox.PLACE)

    return box.build(cache, project, work, add, say)


def say(sentence: str) -> None:
    print(f"[{time.strftime('%T')}] {sentence}", flush=True)


if __name__ == "__main__":
    sandbox.become_init(main)
