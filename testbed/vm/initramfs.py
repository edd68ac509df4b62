"""The initramfs: busybox, a start script and the few modules that mount the host's root.

Owns the newc archive format and the order of modules; pure functions on bytes and paths.
"""

import gzip
import lzma
import stat
from pathlib import Path

from testbed.vm.errors import VmError

# What boot.sh needs before the host's root is there; everything else is loaded from the image's module tree.
BOOT_MODULES = ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay")
DIRECTORIES = ("bin", "dev", "proc", "sys", "ro", "rw", "job", "newroot", "modules")


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


def build(busybox: Path, start_script: Path, modules: list[Path]) -> bytes:
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
