"""The kernel that the VM boots, and its initramfs: from the distribution's kernel package, never installed.

Owns the choice of package and of the modules that are kept, the ELF kernel inside a bzImage, the newc archive format
and the order of modules. Writes only below the directory it is given.
"""

import gzip
import lzma
import os
import re
import stat
import struct
import subprocess
import tarfile
from pathlib import Path, PurePosixPath

from testbed.machine.programs import find_tool
from testbed.vm.tools import VmError

META_PACKAGES = ("linux-image-amd64", "linux-image-generic")  # Debian, Ubuntu
# A VM without devices needs no drivers but the virtual ones: 4,000 modules of 290 MB become 1,000 of 40 MB.
KEPT_MODULES = re.compile(
    r"kernel/("
    r"crypto/|lib/|arch/x86/crypto/|net/(?!mac80211|wireless|bluetooth)"
    r"|fs/(9p|fuse|overlayfs|netfs|fscache)/"
    r"|drivers/(virtio|char)/|drivers/net/[^/]+$"
    r")"
)
SECTOR_BYTES = 512
# Offsets of the x86 boot protocol (kernel: Documentation/arch/x86/boot.rst).
SETUP_SECTORS, MAGIC, PAYLOAD_OFFSET = 0x1F1, 0x202, 0x248
# The ELF note XEN_ELFNOTE_PHYS32_ENTRY (18) makes a kernel bootable without the 16-bit setup code.
PVH_NOTES = tuple(struct.pack("<III4s", 4, size, 18, b"Xen\0") for size in (4, 8))
# What boot.sh needs before the host's root is there; everything else is loaded from the image's module tree.
BOOT_MODULES = ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay")
DIRECTORIES = ("bin", "dev", "proc", "sys", "ro", "rw", "job", "newroot", "modules")


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


def elf_kernel(bzimage: bytes) -> bytes | None:
    """The ELF kernel inside a bzImage; None where its packing is unknown here or it cannot be booted directly.

    QEMU boots it directly, which saves 3.3 of 7.6 s under emulation: unpacking xz in the guest is what takes the time.
    """
    if bzimage[MAGIC : MAGIC + 4] != b"HdrS":
        return None
    setup_sectors = bzimage[SETUP_SECTORS] or 4
    offset, length = struct.unpack_from("<II", bzimage, PAYLOAD_OFFSET)
    start = (setup_sectors + 1) * SECTOR_BYTES + offset
    payload = bzimage[start : start + length]
    try:
        if payload.startswith(b"\xfd7zXZ\0"):
            # Four bytes of size follow the stream, which lzma.decompress would reject.
            kernel = lzma.LZMADecompressor().decompress(payload)
        elif payload.startswith(b"\x1f\x8b"):
            kernel = gzip.decompress(payload[:-4])
        else:
            return None
    except (lzma.LZMAError, OSError, EOFError):
        return None
    return kernel if any(note in kernel for note in PVH_NOTES) else None


def newc_entry(inode: int, name: str, mode: int, data: bytes = b"") -> bytes:
    """One member of a newc cpio archive (kernel: driver-api/early-userspace/buffer-format.rst)."""
    encoded = name.encode() + b"\0"
    numbers = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
    header = b"070701" + b"".join(b"%08X" % number for number in numbers) + encoded
    return header + b"\0" * (-len(header) % 4) + data + b"\0" * (-len(data) % 4)


def module_order(module_tree: Path, names: tuple[str, ...] = BOOT_MODULES) -> list[Path]:
    """Module files in the order in which insmod can load them; built-in ones are left out.

    `module_tree` is lib/modules/RELEASE with a fresh modules.dep.
    """
    dependencies: dict[str, tuple[str, list[str]]] = {}
    for line in (module_tree / "modules.dep").read_text().splitlines():
        path, _, needed = line.partition(":")
        dependencies[_module_name(path)] = (path, needed.split())
    builtin = {_module_name(line) for line in (module_tree / "modules.builtin").read_text().splitlines()}
    order: dict[str, None] = {}
    for name in names:
        if name in dependencies:
            own_path, closure = dependencies[name]
            order.update(dict.fromkeys([*reversed(closure), own_path]))  # the deepest dependency is listed last
        elif name not in builtin:
            raise VmError(
                f"the kernel package has no module {name!r}, which the VM needs to reach the host's files; "
                "the cloud flavour of Debian's kernel lacks it, the ordinary one has it"
            )
    return [module_tree / path for path in order]


def build_initramfs(busybox: Path, start_script: Path, modules: list[Path]) -> bytes:
    """The compressed archive. `modules` are loaded by their numbered names, in order."""
    members = [(name, stat.S_IFDIR | 0o755, b"") for name in DIRECTORIES]
    members.append(("init", stat.S_IFREG | 0o755, start_script.read_bytes()))
    members.append(("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes()))
    for number, path in enumerate(modules):
        members.append((f"modules/{number:02}.ko", stat.S_IFREG | 0o644, _uncompressed(path)))
    archive = b"".join(newc_entry(inode, *member) for inode, member in enumerate(members, start=1))
    return gzip.compress(archive + newc_entry(0, "TRAILER!!!", 0), compresslevel=1, mtime=0)


def _module_name(path: str) -> str:
    return Path(path).name.split(".ko")[0].replace("-", "_")


def _uncompressed(path: Path) -> bytes:
    """A module's ELF bytes: Debian 13 ships them compressed, which busybox's insmod may not read."""
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix == ".ko":
        return data
    raise VmError(f"the kernel package compresses modules as {path.suffix!r} ({path.name}), which is not supported")
