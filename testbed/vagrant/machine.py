"""The host of a run: programs, room, port and KVM, found out before anything is built, and the user of the run.

Also the state of the host, to be compared afterwards. Changes nothing: the user is in no file of the machine.
"""

import pwd
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from testbed.machine.programs import find_tool

# program -> Debian package; libvirt's daemon alone: its system-wide service is not needed
TOOLS = {
    "vagrant": "vagrant",
    "libvirtd": "libvirt-daemon",
    "virsh": "libvirt-clients",
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mmdebstrap": "mmdebstrap",
    "mkfs.ext4": "e2fsprogs",
    "rsync": "rsync",
    "ssh": "openssh-client",
    "git": "git",
    "unshare": "util-linux",
}
PLUGIN = "vagrant-libvirt"
BUILD_BYTES = 12 * 10**9  # the tree of 2.6 GB, the image of 2.7 GB, the packed box and Vagrant's copy of it
RUN_BYTES = 5 * 10**9  # libvirt's copy of the image, and what the guest writes
BOOT_PATIENCE_S = 30
NAME = "pddbed-vagrant"
RUN_UIDS = range(64900, 65000)  # where distributions put nobody


class VagrantError(Exception):
    """The VM cannot be built, started or used; the message says what is wrong and what to do next."""


@dataclass(frozen=True, slots=True)
class Guest:
    """The user of one run."""

    uid: int  # also its group's number
    groups: tuple[int, ...]  # besides its own: the one that may use KVM


def lacking() -> list[str]:
    """Debian packages that are missing."""
    packages = {package for name, package in TOOLS.items() if find_tool(name) is None}
    if find_tool("vagrant") is not None and not _has_plugin():
        packages.add(PLUGIN)
    return sorted(packages)


def require_tools() -> None:
    """Name everything that is missing at once. Raises VagrantError."""
    packages = lacking()
    if packages:
        raise VagrantError(
            f"the Vagrant VM needs what is not here; run: apt-get install --no-install-recommends {' '.join(packages)}"
        )


def require_room(directory: Path, needed_bytes: int, purpose: str) -> None:
    """Raises VagrantError when the file system of `directory` has less than `needed_bytes` free."""
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise VagrantError(
            f"{purpose} needs {needed_bytes / 1e9:.0f} GB in {directory}, where {free / 1e9:.1f} GB are free; "
            "make room, or set PDDBED_CACHE to a directory on another disk"
        )


def require_port(port: int) -> None:
    """Raises VagrantError when somebody listens on the host's loopback at `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise VagrantError(
                f"port {port} of 127.0.0.1, to which the VM's API is forwarded, cannot be taken ({error.strerror}); "
                "end what listens there, or choose another: PDDBED_VM_PORT=18000"
            ) from error


def free_port() -> int:
    """A port of the loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def choose_user() -> Guest:
    """A user whose number nobody has, neither in /etc/passwd nor as a process. Raises StopIteration after 100."""
    taken = {user.pw_uid for user in pwd.getpwall()}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            taken.add(path.stat().st_uid)
        except OSError:
            continue
    return Guest(next(uid for uid in RUN_UIDS if uid not in taken), _kvm_groups())


def boots(accelerator: str, kernel: Path, guest: Guest) -> bool:
    """True when a VM with this kernel boots, as the run's user. /dev/kvm proves nothing: it is there where every boot
    hangs, and where a guest of a few instructions still runs.
    """
    qemu = find_tool("qemu-system-x86_64") or "qemu-system-x86_64"
    command = [qemu, "-accel", accelerator, "-cpu", "host" if accelerator == "kvm" else "Nehalem", "-machine", "q35"]
    command += ["-m", "256", "-display", "none", "-nodefaults", "-no-reboot", "-kernel", str(kernel)]
    # Without a root file system the kernel comes to its end and restarts, which here ends QEMU.
    command += ["-append", "console=ttyS0 panic=-1 quiet", "-serial", "stdio"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=BOOT_PATIENCE_S,
            user=guest.uid,
            group=guest.uid,
            extra_groups=guest.groups,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and b"Kernel panic" in done.stdout


def host_state() -> dict[str, set[str]]:
    """The state that a run must not add to: interfaces, firewall rules, mounts, users, processes of a run's user."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return {
        "interfaces": {path.name for path in Path("/sys/class/net").iterdir()},
        "firewall rules": {line for line in _firewall() if "virbr" in line or "libvirt" in line.lower()},
        "mounts": {line.split()[4] for line in mounts},
        "users": {line for line in Path("/etc/passwd").read_text().splitlines() if line.startswith(NAME)},
        "processes": {f"{path.name} {_comm(path)}" for path in Path("/proc").glob("[0-9]*") if _of_a_run(path)},
    }


def additions(before: dict[str, set[str]], after: dict[str, set[str]]) -> list[str]:
    """The things on the host that were not there before, one sentence a kind."""
    return [f"new {kind}: {', '.join(sorted(after[kind] - had))}" for kind, had in before.items() if after[kind] - had]


def _kvm_groups() -> tuple[int, ...]:
    """The group of /dev/kvm, unless that is root's."""
    try:
        group = Path("/dev/kvm").stat().st_gid
    except OSError:
        return ()
    return (group,) if group else ()


def _of_a_run(process: Path) -> bool:
    try:
        return process.stat().st_uid in RUN_UIDS
    except OSError:
        return False


def _firewall() -> list[str]:
    commands: list[tuple[str, ...]] = [("nft", "list", "ruleset")]
    if Path("/proc/net/ip_tables_names").exists():  # else listing the old tables would load their modules
        commands.append(("iptables-legacy-save",))
    return [line.strip() for command in commands for line in _lines(*command)]


def _has_plugin() -> bool:
    """Debian's package, which every user has; a plugin in somebody's home directory is not the run's."""
    return bool(list(Path("/usr/share/rubygems-integration").glob(f"*/specifications/{PLUGIN}-*.gemspec")))


def _lines(*command: str) -> list[str]:
    program = find_tool(command[0])
    if program is None:
        return []
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout.splitlines()


def _comm(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return ""
