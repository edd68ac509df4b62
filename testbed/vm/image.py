"""The VM's image: kernel, modules and initramfs in a cache directory, built once and checked before each use.

Owns the cache's layout, its lock and its manifest. An image is written beside its final place and renamed, so
that an interrupted build leaves nothing that looks finished. Removes only images that carry our mark.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testbed.machine import owned
from testbed.vm import kernel, tools
from testbed.vm.tools import VmError

BOOT_SCRIPT = Path(__file__).parent / "guest" / "boot.sh"
BUILDERS = (
    BOOT_SCRIPT,
    *(Path(__file__).with_name(f"{name}.py") for name in ("image", "kernel")),
)
MANIFEST = "manifest.json"
KIND = "VM image"


@dataclass(frozen=True, slots=True)
class VmImage:
    """A complete image on disk."""

    directory: Path
    kernel_release: str

    @property
    def kernel(self) -> Path:
        return self.directory / "kernel"

    @property
    def initramfs(self) -> Path:
        return self.directory / "initramfs.gz"

    @property
    def modules(self) -> Path:
        """lib/modules, to be mounted there in the guest."""
        return self.directory / "lib" / "modules"


def default_cache() -> Path:
    """`pddbed/vm` below $PDDBED_CACHE, below /var/cache for root, below the user's own cache directory for others."""
    return owned.cache_directory("vm")


def ensure_image(cache: Path, say: Callable[[str], None], newest: bool = False) -> VmImage:
    """A good image from the cache, built when there is none.

    Any kernel will do, so that a machine works offline once it has one; `newest` builds what apt offers now.
    `say` gets one line before the slow part. Raises VmError.
    """
    image = None if newest else _find(cache)
    if image is not None and is_intact(image):
        return image
    tools.require(tools.BUILD_TOOLS | tools.RUN_TOOLS, "the VM")
    busybox = tools.static_busybox()
    with _locked(cache):
        image = None if newest else _find(cache)  # another process may have built it meanwhile
        if image is not None:
            if is_intact(image):
                return image
            say(f"the VM's image in {image.directory} is damaged; building it again")
            _remove_damaged(image.directory)
        packages = kernel.candidate_packages()
        release = kernel.kernel_release(packages[0])
        final = cache / _key(release)
        if final.exists():
            image = VmImage(final, release)
            if is_intact(image):
                return image
            _remove_damaged(final)
        say(f"building the VM's image once, from {packages[0]} (a download of about 70 MB)")
        _build(final, packages, release, busybox)
        owned.sweep(cache, KIND, final)  # images of older programs and kernels, and builds that were killed
    return VmImage(final, release)


def is_intact(image: VmImage) -> bool:
    """True when every file is what was written (about 110 MB hashed, 0.1 s)."""
    try:
        manifest: dict[str, str] = json.loads((image.directory / MANIFEST).read_text())
        return manifest == digests(image.directory)
    except (OSError, ValueError):
        return False


def harness_version() -> str:
    """Changes whenever the code that builds images changes: an older one could behave differently."""
    digest = hashlib.sha256()
    for path in BUILDERS:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@contextmanager
def in_use(image: VmImage) -> Iterator[None]:
    """Inside the block no other process removes the image as superseded."""
    try:
        lock = os.open(image.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise VmError(f"the VM's image {image.directory} has just been replaced; run the command again") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield
    finally:
        os.close(lock)


def _key(release: str) -> str:
    return f"{release}+{harness_version()}"


def _find(cache: Path) -> VmImage | None:
    """The newest image of this harness version."""
    found = [path for path in cache.glob(f"*+{harness_version()}") if path.is_dir()]
    if not found:
        return None
    directory = max(found, key=lambda path: path.stat().st_mtime_ns)
    return VmImage(directory, directory.name.rpartition("+")[0])


def _build(final: Path, packages: list[str], release: str, busybox: Path) -> None:
    work = owned.make_aside(final.parent, final.name, KIND)
    try:
        work.chmod(0o755)
        downloads = work / "packages"
        downloads.mkdir()
        for package in kernel.fetch(packages, downloads):
            kernel.unpack(package, work)
        shutil.rmtree(downloads)
        tree = work / "lib" / "modules" / release
        packed = work / "vmlinuz"
        if not packed.exists() or not tree.is_dir():
            raise VmError(f"{packages[0]} holds no kernel or no modules; report this with the package's version")
        (work / "kernel").write_bytes(kernel.elf_kernel(packed.read_bytes()) or packed.read_bytes())
        packed.unlink()
        kernel.index_modules(work, release)
        order = kernel.module_order(tree)
        (work / "initramfs.gz").write_bytes(kernel.build_initramfs(busybox, BOOT_SCRIPT, order))
        (work / MANIFEST).write_text(json.dumps(digests(work), indent=0))
        work.rename(final)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _remove_damaged(directory: Path) -> None:
    """Raises VmError where it is not an image of ours."""
    if not owned.remove(directory, KIND):
        raise VmError(
            f"{directory} is in the way of the VM's image, and nothing that pddbed made; move it away, or set "
            "PDDBED_CACHE to another directory"
        )


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every file below `directory`, but the manifest."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path != directory / MANIFEST:
            with path.open("rb") as file:
                found[path.relative_to(directory).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    try:
        owned.make_cache(cache)
        lock = os.open(cache / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise VmError(
            f"the VM's cache {cache} cannot be written ({error.strerror}); set PDDBED_CACHE to another directory"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
