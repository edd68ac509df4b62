"""Where the VM's kernel comes from: the distribution's kernel package, fetched by apt, unpacked, never installed.

Owns the choice of package and of the modules that are kept; writes only below the directory it is given.
"""

import os
import re
import subprocess
import tarfile
from pathlib import Path, PurePosixPath

from testbed.vm.errors import VmError
from testbed.vm.tools import find_tool

META_PACKAGES = ("linux-image-amd64", "linux-image-generic")  # Debian, Ubuntu
# A VM without devices needs no drivers but the virtual ones: 4,000 modules of 290 MB become 1,000 of 40 MB.
KEPT_MODULES = re.compile(
    r"kernel/("
    r"crypto/|lib/|arch/x86/crypto/|net/(?!mac80211|wireless|bluetooth)"
    r"|fs/(9p|fuse|overlayfs|netfs|fscache)/"
    r"|drivers/(virtio|char)/|drivers/net/[^/]+$"
    r")"
)


def candidate_packages() -> list[str]:
    """The packages that hold the newest kernel that apt knows: one on Debian, image and modules on Ubuntu."""
    for meta in META_PACKAGES:
        output = _run("apt-cache", "depends", meta, check=False)
        depends = re.findall(r"Depends: (linux-[\w.+-]+)", output)
        image = next((name for name in depends if re.match(r"linux-image-(unsigned-)?\d", name)), None)
        if image is None:
            continue
        release = kernel_release(image)
        if meta == "linux-image-generic":
            return [image, f"linux-modules-{release}", f"linux-modules-extra-{release}"]
        return [image]
    raise VmError(
        f"apt knows no kernel package ({' or '.join(META_PACKAGES)}), from which the VM takes its kernel; "
        "run: apt-get update"
    )


def kernel_release(image_package: str) -> str:
    """`linux-image-6.1.0-57-amd64` -> `6.1.0-57-amd64`."""
    return re.sub(r"^linux-image-(unsigned-)?", "", image_package)


def fetch(packages: list[str], directory: Path) -> list[Path]:
    """Download packages into `directory`; apt checks their signatures and hashes."""
    # As root, apt would drop to the user _apt, who may not write here, and warn about it.
    _run("apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", *packages, cwd=directory)
    return sorted(directory.glob("*.deb"))


def unpack(package: Path, directory: Path) -> None:
    """Write a package's kernel as `vmlinuz` and the modules worth keeping as lib/modules/RELEASE/."""
    dpkg_deb = find_tool("dpkg-deb") or "dpkg-deb"
    process = subprocess.Popen([dpkg_deb, "--fsys-tarfile", str(package)], stdout=subprocess.PIPE)
    with process, tarfile.open(fileobj=process.stdout, mode="r|") as archive:
        for member in archive:
            # Debian 13 and Ubuntu keep modules in /usr/lib/modules.
            path = PurePosixPath(member.name).as_posix().removeprefix("usr/")
            if member.isfile() and path.startswith("boot/vmlinuz-"):
                target = directory / "vmlinuz"
            elif member.isfile() and path.startswith("lib/modules/") and _kept(path):
                target = directory / path
            else:
                continue
            source = archive.extractfile(member)
            assert source is not None
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read())
    if process.returncode != 0:
        raise VmError(f"unpacking {package.name} failed (dpkg-deb status {process.returncode}); try again")


def index_modules(directory: Path, release: str) -> None:
    """Run depmod on the kept modules."""
    _run("depmod", "-b", str(directory), release)


def _kept(path: str) -> bool:
    within = path.split("/", 3)[3] if path.count("/") >= 3 else ""
    return within in ("modules.builtin", "modules.builtin.modinfo", "modules.order") or bool(KEPT_MODULES.match(within))


def _run(name: str, *arguments: str, cwd: Path | None = None, check: bool = True) -> str:
    result = subprocess.run(
        [find_tool(name) or name, *arguments],
        cwd=cwd,
        env=os.environ | {"LC_ALL": "C"},  # a proxy in the environment must reach apt
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if check and result.returncode != 0:
        reason = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:] or ["no message"]
        raise VmError(
            f"the VM's kernel cannot be prepared: {name} {arguments[0]} failed ({reason[0]}); "
            "check the network and run: apt-get update"
        )
    return result.stdout
