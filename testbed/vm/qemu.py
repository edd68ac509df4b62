"""The command line of the emulator, as a pure function."""

from pathlib import Path

from testbed.vm.image import VmImage

# Nehalem, not `max`: emulated AVX2 is 25 times slower than SSE. Never KVM: its device node exists on machines
# (Firecracker guests among them) where starting a guest hangs.
CPU_MODEL = "Nehalem"
KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet panic=-1 mitigations=off nokaslr random.trust_cpu=on tsc=reliable cryptomgr.notests "
    "net.ifnames=0"
)


def command_line(
    qemu: str, image: VmImage, job_directory: Path, stdout_fd: int, stderr_fd: int, memory: str, cpus: int
) -> list[str]:
    """QEMU with the host's root read-only, the job directory read-write, two byte streams out, no network.

    `stdout_fd` and `stderr_fd` are inherited connected stream sockets.
    """
    return [
        *(qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-nic", "none"),
        *("-M", "q35", "-accel", "tcg,thread=multi", "-cpu", CPU_MODEL, "-smp", str(cpus), "-m", memory),
        *("-kernel", str(image.kernel), "-initrd", str(image.initramfs), "-append", KERNEL_ARGUMENTS),
        *("-serial", f"file:{escape(job_directory / 'console.log')}"),
        *_shared_directory("host", Path("/"), "readonly=on,multidevs=remap"),
        *_shared_directory("job", job_directory, "readonly=off"),
        *("-device", "virtio-serial-pci"),
        *("-chardev", f"socket,id=stdout,fd={stdout_fd}", "-device", "virtserialport,chardev=stdout,nr=1"),
        *("-chardev", f"socket,id=stderr,fd={stderr_fd}", "-device", "virtserialport,chardev=stderr,nr=2"),
    ]


def escape(path: Path) -> str:
    """A path inside one of QEMU's comma-separated option lists."""
    return str(path).replace(",", ",,")


def _shared_directory(tag: str, path: Path, options: str) -> tuple[str, ...]:
    # security_model=none: as an ordinary user, ownership cannot be changed and need not be.
    return (
        *("-fsdev", f"local,id={tag},path={escape(path)},security_model=none,{options}"),
        *("-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"),
    )
