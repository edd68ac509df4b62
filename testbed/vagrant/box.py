"""The box that the Vagrantfile names, made from Debian's packages: kept in the cache, keyed by what it is made of.

Owns the cache's layout and its manifests. A box is built beside its final place and renamed, so that an interrupted
build leaves nothing that looks finished. `build-box.sh` does the work.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from testbed.machine import owned
from testbed.vagrant.machine import VagrantError
from testbed.vm.image import MANIFEST, digests

BOX_NAME = "debian/bookworm64"  # as the Vagrantfile has it
FOLDER = BOX_NAME.replace("/", "-VAGRANTSLASH-")  # as Vagrant writes it
HERE = Path(__file__).parent
RECIPE = ("build-box.sh", "guest-packages.sh")
INSTALLED = ("dependencies", "optional-dependencies", "scripts")  # what pip makes of pyproject.toml
KIND = "Vagrant box"
GUEST_PYTHON = (3, 11)  # Debian 12's


@dataclass(frozen=True, slots=True)
class Box:
    """A finished box in the cache: `boxes` is what $VAGRANT_HOME/boxes holds after `vagrant box add`."""

    directory: Path

    @property
    def boxes(self) -> Path:
        return self.directory / "boxes"

    @property
    def kernel(self) -> Path:
        return self.boxes / FOLDER / "0" / "libvirt" / "vmlinuz"


def key_of(project: Path) -> str:
    """Changes with everything that the box's content depends on, Debian's own updates aside."""
    digest = hashlib.sha256()
    for path in (*(HERE / name for name in RECIPE), project / "constraints.txt"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    described = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    installed = {name: described.get(name) for name in INSTALLED}  # not the settings of linters and tests
    digest.update(json.dumps(installed, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def find(cache: Path, project: Path) -> Box | None:
    """The project's box, if it has been built, each of its files as it was written. Raises VagrantError."""
    box = Box(cache / f"box-{key_of(project)}")
    if not box.directory.exists():
        return None
    problem = damage(box.directory)
    if problem is not None:
        raise VagrantError(
            f"the cached box {box.directory} is damaged ({problem}); remove it with: rm -r {box.directory}, "
            "and run the command again, which builds it anew"
        )
    return box


def damage(directory: Path) -> str | None:
    """A mistake in a box's files, or None."""
    try:
        manifest: dict[str, str] = json.loads((directory / MANIFEST).read_text())
        lacking = sorted(name for name in manifest if not (directory / name).is_file())
        if lacking:
            return f"{lacking[0]} is missing"
        found = digests(directory)
    except (OSError, ValueError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read: {error}"
    changed = sorted(name for name in manifest.keys() | found.keys() if manifest.get(name) != found.get(name))
    return f"{changed[0]} is not what was written" if changed else None


def build(cache: Path, project: Path, work: Path, add: Callable[[Path], Path], say: Callable[[str], None]) -> Box:
    """Build the box of `project`, a copy of the working tree, in `work`, beside the cache. Raises VagrantError.

    `add` runs `vagrant box add` on a .box file and returns the boxes directory that it filled.
    """
    wheels, contents = work / "wheels", work / "contents"
    wheels.mkdir(exist_ok=True)
    if sys.version_info[:2] == GUEST_PYTHON:
        say("fetching the Python packages")
        _run([sys.executable, "-m", "pip", "wheel", "-q", "-c", str(project / "constraints.txt"), "-w", str(wheels),
              f"{project}[dev]", "setuptools"], work, "fetching the Python packages")  # fmt: skip
    say("building the box from Debian's packages")
    _run(["bash", str(HERE / "build-box.sh"), str(work), str(project), str(wheels)], work, "building the box")
    file = work / "pddbed.box"  # not compressed: it is unpacked at once and never travels
    _run(
        ["tar", "-C", str(contents), "-cf", str(file), *sorted(path.name for path in contents.iterdir())],
        work,
        "packing the box",
    )
    shutil.rmtree(contents)
    finished = work / "finished"
    finished.mkdir()
    final = cache / f"box-{key_of(project)}"
    owned.mark(finished, KIND, final.name)
    shutil.move(add(file), finished / "boxes")
    file.unlink()
    for path in finished.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.chown(path, 0, 0)  # Vagrant, an ordinary user, reads it only
    (finished / MANIFEST).write_text(json.dumps(digests(finished), indent=0))
    finished.rename(final)
    return Box(final)


def _run(command: list[str], work: Path, what: str) -> None:
    """Run one step, its output in a log; on failure its last lines are the reason."""
    log = work / "build.log"
    with log.open("ab") as output:
        done = subprocess.run(command, cwd=work, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        tail = "\n  ".join(log.read_text(errors="replace").strip().splitlines()[-12:])
        raise VagrantError(
            f"{what} failed with status {done.returncode}; check the network, run: apt-get update, and try again. "
            f"Its last lines:\n  {tail}"
        )
