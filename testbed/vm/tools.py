"""Programs of this machine that the VM needs, and the Debian packages that bring them."""

import platform
from pathlib import Path

from testbed.machine.programs import find_tool

# program -> Debian/Ubuntu package. Two lists: building the image needs more than running it.
RUN_TOOLS = {"qemu-system-x86_64": "qemu-system-x86", "bash": "bash", "ip": "iproute2", "modprobe": "kmod"}
BUILD_TOOLS = {"apt-get": "apt", "apt-cache": "apt", "dpkg-deb": "dpkg", "depmod": "kmod"}


class VmError(Exception):
    """The VM cannot be built or started; the message says what is missing and what to do next."""


def missing_packages(tools: dict[str, str]) -> list[str]:
    """Debian packages of the programs that this machine lacks, without repetition."""
    return sorted({package for name, package in tools.items() if find_tool(name) is None})


def require(tools: dict[str, str], purpose: str) -> None:
    """Raise VmError naming everything that is missing at once."""
    if platform.machine() != "x86_64":
        raise VmError(
            f"the VM runs this machine's own programs and is made for x86_64 only, not {platform.machine()}; "
            "run on a kernel that has sch_netem, or use the userspace driver"
        )
    packages = missing_packages(tools)
    if packages:
        raise VmError(
            f"{purpose} needs programs that are not here; "
            f"run: apt-get install --no-install-recommends {' '.join(packages)}"
        )


def static_busybox() -> Path:
    """A busybox that runs without libraries: the initramfs holds nothing else."""
    for candidate in ("/bin/busybox", "/usr/bin/busybox"):
        path = Path(candidate)
        # A dynamic executable names its loader in the first page (PT_INTERP).
        if path.exists() and b"/ld-" not in path.read_bytes()[:4096]:
            return path
    raise VmError(
        "the VM's initramfs needs a statically linked busybox; "
        "run: apt-get install --no-install-recommends busybox-static"
    )
