"""The image: built once, recognised when damaged, complete when two processes want it at once."""

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.vm import kernel
from testbed.vm.image import VmImage, ensure_image, is_intact
from testbed.vm.tools import VmError

ENSURE = "import sys; from pathlib import Path; from testbed.vm.image import ensure_image; "
ENSURE += "print(ensure_image(Path(sys.argv[1]), print).directory)"


def test_a_good_image_is_used_again_without_a_word(image: VmImage) -> None:
    said: list[str] = []
    assert ensure_image(image.directory.parent, said.append) == image
    assert said == []


def test_damage_anywhere_is_seen(image: VmImage, private_cache: Path) -> None:
    copy = VmImage(private_cache / image.directory.name, image.kernel_release)
    module = next(copy.modules.rglob("sch_netem.ko*"))
    for damaged in (copy.kernel, copy.initramfs, module):
        good = damaged.read_bytes()
        damaged.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        assert not is_intact(copy), damaged
        damaged.write_bytes(good)
        assert is_intact(copy)
    module.unlink()
    assert not is_intact(copy)


def test_two_processes_that_find_a_damaged_image_build_it_once(image: VmImage, private_cache: Path) -> None:
    (private_cache / image.directory.name / "kernel").write_bytes(b"cut short")
    processes = [
        subprocess.Popen([sys.executable, "-c", ENSURE, private_cache], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum("building it again" in line for lines in outputs for line in lines) == 1
    # apt may know a newer kernel by now, so only the harness's half of the name is certain.
    directories = {lines[-1] for lines in outputs}
    assert len(directories) == 1
    assert is_intact(VmImage(Path(directories.pop()), ""))
    assert not list(private_cache.glob(".*+*"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VmError, match="PDDBED_CACHE"):
        ensure_image(tmp_path / "file" / "cache", print)


def test_busybox_reads_the_archive_that_we_write(tmp_path: Path) -> None:
    script = tmp_path / "start"
    script.write_bytes(b"#!/bin/sh\necho odd\n")
    module = tmp_path / "first.ko"
    module.write_bytes(b"\x7fELF odd length")
    archive = gzip.decompress(kernel.build_initramfs(Path("/bin/busybox"), script, [module]))
    listing = subprocess.run(["busybox", "cpio", "-t"], input=archive, capture_output=True, check=True).stdout
    assert set(listing.decode().split()) == {*kernel.DIRECTORIES, "init", "bin/busybox", "modules/00.ko"}
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["busybox", "cpio", "-i"], input=archive, cwd=unpacked, check=True, capture_output=True)
    assert (unpacked / "init").read_bytes() == script.read_bytes()
    assert (unpacked / "init").stat().st_mode & 0o777 == 0o755
    assert (unpacked / "modules/00.ko").read_bytes() == module.read_bytes()


def test_modules_are_ordered_so_that_each_finds_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "modules.dep").write_text(
        "k/9pnet.ko:\nk/9pnet_virtio.ko: k/9pnet.ko k/virtio_ring.ko k/virtio.ko\n"
        "k/virtio.ko:\nk/virtio_ring.ko: k/virtio.ko\nk/over-lay.ko.xz:\n"
    )
    (tmp_path / "modules.builtin").write_text("kernel/drivers/char/virtio_console.ko\n")
    order = kernel.module_order(tmp_path, ("virtio_console", "9pnet_virtio", "over_lay"))
    assert [path.name for path in order] == [
        "virtio.ko",
        "virtio_ring.ko",
        "9pnet.ko",
        "9pnet_virtio.ko",
        "over-lay.ko.xz",
    ]
    with pytest.raises(VmError, match="no module 'virtiofs'"):
        kernel.module_order(tmp_path, ("virtiofs",))


def test_a_kernel_of_unknown_packing_is_left_to_the_loader() -> None:
    assert kernel.elf_kernel(b"\0" * 1024) is None
    packed = bytearray(b"\0" * 4096)
    packed[kernel.MAGIC : kernel.MAGIC + 4] = b"HdrS"
    assert kernel.elf_kernel(bytes(packed)) is None


def test_missing_programs_are_named_with_their_packages(tmp_path: Path) -> None:
    # An empty PATH hides what is in /usr/bin; sbin is searched all the same.
    program = "import sys; from testbed.vm.image import *\ntry: ensure_image(Path(sys.argv[1]), print)\n"
    program += "except VmError as error: print(error)"
    result = subprocess.run(
        [sys.executable, "-c", program, tmp_path], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert "apt-get install --no-install-recommends" in result.stdout
    assert "qemu-system-x86" in result.stdout
    assert len(result.stdout.splitlines()) == 1
