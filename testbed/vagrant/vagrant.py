"""Vagrant, run inside the sandbox as its ordinary user on the project's own Vagrantfile: up, a command in it, destroy.

With libvirt's session and user-mode networking nothing is made on the host. The defaults would do otherwise (KVM that
hangs, a bridge, DHCP, firewall rules), so nothing starts without the Vagrantfile below $VAGRANT_HOME.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.vagrant.box import BOX_NAME, FOLDER
from testbed.vagrant.machine import NAME, Guest, VagrantError
from testbed.vagrant.sandbox import PLACE

HOME_FILE = Path(__file__).with_name("home.Vagrantfile")
SESSION = 'uri = "qemu:///session"'
PASSED_ON = ("PDDBED_VM_CPUS", "PDDBED_VM_MEMORY", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "LANG", "TERM")
UP_PATIENCE_S = 1200


@dataclass(frozen=True)
class Vagrant:
    """Vagrant as `guest`, its home and the project's copy below /mnt."""

    guest: Guest
    api_port: int
    ssh_port: int
    kvm: bool

    @property
    def home(self) -> Path:
        return PLACE / "home"

    @property
    def project(self) -> Path:
        return PLACE / "project"

    @property
    def vagrant_home(self) -> Path:
        return self.home / "vagrant.d"

    def prepare(self) -> None:
        """Make the user's directories, with the Vagrantfile that keeps the host's network out of it."""
        for path in (self.vagrant_home, self.home / "run", self.home / "tmp"):
            path.mkdir(mode=0o700)
            os.chown(path, self.guest.uid, self.guest.uid)
        shutil.copy(HOME_FILE, self.vagrant_home / "Vagrantfile")
        (self.vagrant_home / "Vagrantfile").chmod(0o644)
        boxes = PLACE / "boxes"
        if boxes.exists():
            (self.vagrant_home / "boxes").mkdir()
            (self.vagrant_home / "boxes" / FOLDER).symlink_to(boxes / FOLDER)

    def environment(self) -> dict[str, str]:
        """Nothing of the caller's but what is named: its HOME and its libvirt are not this user's."""
        passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        return passed | {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self.home),
            "USER": NAME,
            "LOGNAME": NAME,
            "TMPDIR": str(self.home / "tmp"),
            "XDG_RUNTIME_DIR": str(self.home / "run"),
            "VAGRANT_HOME": str(self.vagrant_home),
            "VAGRANT_CHECKPOINT_DISABLE": "1",
            "VAGRANT_NO_COLOR": "1",
            "PDDBED_VM_PORT": str(self.api_port),
            "PDDBED_VM_MODEL": "",
            "PDDBED_VAGRANT_SSH_PORT": str(self.ssh_port),
            "PDDBED_VAGRANT_KVM": "1" if self.kvm else "0",
        }

    def add(self, file: Path) -> Path:
        """`vagrant box add`; returns the directory of boxes."""
        self._vagrant("box", "add", "--name", BOX_NAME, str(file), timeout_s=600)
        return self.vagrant_home / "boxes"

    def up(self, heard: Callable[[str], None]) -> None:
        """Boot and provision the VM; `heard` gets each line as Vagrant says it."""
        self._refuse_a_bridge()
        command = ["timeout", str(UP_PATIENCE_S), "vagrant", "up", "--provider=libvirt"]
        said: list[str] = []
        with subprocess.Popen(
            command, **self._as_user(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line.decode(errors="replace").rstrip())
                heard(said[-1])
        if process.returncode != 0:
            reason = f"had not ended after {UP_PATIENCE_S} s" if process.returncode == 124 else "failed"
            raise VagrantError(f"vagrant up {reason}; its last lines:\n  " + "\n  ".join(said[-15:]))

    def ssh(self, command: str, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        """Run a shell command in the VM; its own status, output on this process's."""
        return self._run("ssh", "-c", command, timeout_s=timeout_s, stdout=None, stderr=None)

    def fetch(self, command: str, timeout_s: float, statuses: tuple[int, ...] = (0,)) -> bytes:
        """The output of a shell command in the VM. Raises VagrantError when its status is another."""
        done = self._run("ssh", "-c", command, timeout_s=timeout_s)
        if done.returncode not in statuses:
            said = _tail(done.stdout + done.stderr)
            raise VagrantError(f"in the VM, {command!r} failed with status {done.returncode}:\n  {said}")
        return done.stdout

    def destroy(self) -> None:
        """Remove VM and volume."""
        self._vagrant("destroy", "-f", timeout_s=120)

    def volumes(self) -> list[str]:
        """Names of the domains, and of the volumes but the box's own image, that libvirt's session still has."""
        pool = self.home / ".local/share/libvirt/images"
        left = [path.name for path in pool.glob("*") if "_vagrant_box_image_" not in path.name]
        listed = subprocess.run(
            ["virsh", "-q", "-c", "qemu:///session", "list", "--all", "--name"], **self._as_user(), capture_output=True
        )
        return [*listed.stdout.decode().split(), *left]

    def _refuse_a_bridge(self) -> None:
        file = self.vagrant_home / "Vagrantfile"
        if not file.exists() or SESSION not in file.read_text() or self.guest.uid == 0:
            raise VagrantError(
                f"{file} does not choose libvirt's session of an ordinary user; without it Vagrant would put a bridge, "
                "a DHCP server and firewall rules on this machine, so nothing was started"
            )

    def _vagrant(self, *arguments: str, timeout_s: float) -> str:
        done = self._run(*arguments, timeout_s=timeout_s)
        if done.returncode != 0:
            raise VagrantError(
                f"vagrant {' '.join(arguments[:2])} failed with status {done.returncode}; its last lines:\n  "
                + _tail(done.stdout + done.stderr)
            )
        return (done.stdout + done.stderr).decode(errors="replace")

    def _run(
        self,
        *arguments: str,
        timeout_s: float,
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = subprocess.PIPE,
    ) -> subprocess.CompletedProcess[bytes]:
        try:
            return subprocess.run(
                ["vagrant", *arguments],
                **self._as_user(),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            said = _tail((error.stdout or b"") + (error.stderr or b""))
            raise VagrantError(
                f"vagrant {arguments[0]} had not ended after {timeout_s:.0f} s (is this machine busy?); "
                f"it had said:\n  {said}"
            ) from error

    def _as_user(self) -> dict[str, Any]:
        uid = self.guest.uid
        return {
            "cwd": self.project,
            "env": self.environment(),
            "user": uid,
            "group": uid,
            "extra_groups": list(self.guest.groups),
        }


def _tail(output: bytes, lines: int = 15) -> str:
    return "\n  ".join(output.decode(errors="replace").strip().splitlines()[-lines:])
