"""One run of the VM: start QEMU, pass the guest's output on as it comes, end QEMU whatever happens.

Owns the process, its command line, the time-out and the clean-up. The result is the command's own status, or 124 and
125 as `timeout` and container tools use them.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from testbed.machine import programs
from testbed.vm import tools
from testbed.vm.image import VmImage, in_use
from testbed.vm.job import VmJob, copy_output, job_directory
from workers.linux import die_with_parent

STATUS_TIMEOUT = 124
STATUS_GUEST_DIED = 125
# Nehalem, not `max`: emulated AVX2 is 25 times slower than SSE. Never KVM: its device node exists on machines
# (Firecracker guests among them) where starting a guest hangs.
CPU_MODEL = "Nehalem"
KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet panic=-1 mitigations=off nokaslr random.trust_cpu=on tsc=reliable cryptomgr.notests "
    "net.ifnames=0"
)


@dataclass(frozen=True, slots=True)
class VmResult:
    """The command's status, and a sentence when the VM and not the command decided it."""

    status: int
    message: str | None = None


@dataclass(slots=True)
class TrailedStream:
    """Splits `data \\0 NONCE status \\n` into data, passed on at once, and the status.

    Only bytes that could begin the trailer are held back, so output is live.
    """

    nonce: bytes
    status: int | None = None
    _held: bytes = field(default=b"")

    @property
    def marker(self) -> bytes:
        return b"\0" + self.nonce + b" "

    def feed(self, data: bytes) -> bytes:
        """The bytes of `data` (and of earlier calls) that are certainly output."""
        if self.status is not None:
            return b""
        held = self._held + data
        start = held.find(self.marker)
        if start >= 0:
            number, newline, _ = held[start + len(self.marker) :].partition(b"\n")
            if newline:
                self.status = int(number)
                self._held = b""
                return held[:start]
        else:
            start = len(held) - _overlap(held, self.marker)
        self._held = held[start:]
        return held[:start]

    def rest(self) -> bytes:
        """The bytes held back, when the stream ended without a trailer."""
        held, self._held = self._held, b""
        return held


def run(
    job: VmJob,
    image: VmImage,
    cache: Path,
    stdout: int = 1,
    stderr: int = 2,
    say: Callable[[str], None] = print,
) -> VmResult:
    """Run the job; the guest's output goes to the two file descriptors. Raises VmError without QEMU.

    Ctrl-C, SIGTERM and SIGHUP end QEMU and remove the job's files; when this process is killed, the kernel
    ends QEMU and the next run removes the files.
    """
    tools.require(tools.RUN_TOOLS, "the VM")
    with _signals_raise(), in_use(image), job_directory(job, image.modules, cache) as (directory, nonce):
        result = _run_in(job, image, directory, nonce, (stdout, stderr))
        if job.output is not None:
            skipped = copy_output(directory, job.output)
            if skipped:
                say(f"not copied, being neither file nor directory: {', '.join(skipped)}")
        return result


def _run_in(job: VmJob, image: VmImage, directory: Path, nonce: bytes, targets: tuple[int, int]) -> VmResult:
    qemu = programs.find_tool("qemu-system-x86_64") or "qemu-system-x86_64"
    deadline = time.monotonic() + job.timeout_s
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in targets]
        for ours, theirs in pairs:
            stack.enter_context(ours)
            stack.enter_context(theirs)
        fds = [theirs.fileno() for _, theirs in pairs]
        complaints = stack.enter_context((directory / "qemu.log").open("w+b"))
        process = subprocess.Popen(
            command_line(qemu, image, directory, fds[0], fds[1], job.memory, job.cpus),
            stdin=subprocess.DEVNULL,
            stdout=complaints,
            stderr=complaints,
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C is for this process, which then ends QEMU in order
            preexec_fn=die_with_parent,
        )
        stack.callback(_end, process)
        _hand_on_niceness(process.pid)
        for _, theirs in pairs:
            theirs.close()
        streams = [TrailedStream(nonce) for _ in targets]
        timed_out = _pass_on([ours for ours, _ in pairs], streams, targets, deadline)
        status = streams[0].status
        if status is not None:
            return VmResult(status)
        if timed_out:
            state = "the command had not ended" if (directory / "booted").exists() else "the VM had not started"
            return VmResult(STATUS_TIMEOUT, f"time-out after {job.timeout_s:g} s: {state}")
        ended = process.wait(timeout=10)
        return VmResult(STATUS_GUEST_DIED, _post_mortem(directory, ended))


def _pass_on(
    sources: list[socket.socket], streams: list[TrailedStream], targets: tuple[int, int], deadline: float
) -> bool:
    """Copy until every stream has its trailer or has ended; True when the deadline came first."""
    with selectors.DefaultSelector() as selector:
        for source, stream, target in zip(sources, streams, targets, strict=True):
            selector.register(source, selectors.EVENT_READ, (source, stream, target))
        while selector.get_map():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return True
            for key, _ in selector.select(remaining):
                source, stream, target = key.data
                try:
                    data = source.recv(1 << 16)
                except ConnectionResetError:
                    data = b""
                _write_all(target, stream.feed(data) if data else stream.rest())
                if not data or stream.status is not None:
                    selector.unregister(source)
    return False


def _write_all(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]


def _post_mortem(directory: Path, qemu_status: int) -> str:
    """The reason why the VM ended before its command: QEMU's complaint or the end of the guest's console."""
    lines: list[str] = []
    for name in ("qemu.log", "console.log"):
        with contextlib.suppress(OSError):
            lines += (directory / name).read_text(errors="replace").replace("\r", "").splitlines()
    telling = [line for line in lines[:-20] if "panic" in line or "pddbed-vm:" in line]
    told = "\n  ".join(line for line in [*telling, *lines[-20:]] if line.strip())
    return f"the VM ended before the command did (QEMU status {qemu_status}); its last words:\n  {told}"


def _hand_on_niceness(pid: int) -> None:
    """A nice value counts only among the processes of one session where autogroups are on: give QEMU's group ours."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # nothing in the VM is worth a slower end: its files are written through
    process.wait()


class _Terminated(SystemExit):
    """SIGTERM or SIGHUP as an exception, so that every `finally` runs."""


@contextmanager
def _signals_raise() -> Iterator[None]:
    def terminate(number: int, frame: FrameType | None) -> None:
        raise _Terminated(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    try:
        before = {number: signal.signal(number, terminate) for number in numbers}
    except ValueError:  # not the main thread: the caller owns the signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def default_cpus() -> int:
    """The number of CPUs that this process may use, at most four: more emulated CPUs only spin."""
    return max(1, min(4, len(os.sched_getaffinity(0))))


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


def _overlap(data: bytes, marker: bytes) -> int:
    """Length of the longest end of `data` that begins `marker`."""
    for length in range(min(len(data), len(marker) - 1), 0, -1):
        if data.endswith(marker[:length]):
            return length
    return 0
