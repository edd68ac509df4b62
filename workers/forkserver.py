"""The fork server: imports torch and loads the weights once, runs no operation, and forks each worker from that.

Started by the lab with a control socket (SOCK_SEQPACKET) on PDDBED_FORKSERVER_FD; protocol in docs/wire.md, section
"Fork server". Owns the children's birth (namespaces, log, cgroup, affinity) and tells of their death. It never starts a
thread: only a single-threaded process can be forked, or join a mount namespace, safely.
"""

import array
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from workers.linux import CLONE_NEWNET, CLONE_NEWNS, die_with_parent, setns
from workers.spawning import (
    MAX_FDS,
    MAX_REQUEST_BYTES,
    Answer,
    Exited,
    Failed,
    Ready,
    Spawn,
    Spawned,
    decode_request,
    encode,
)

GRACE_S = 2.0


class SpawnError(Exception):
    """A worker could not be started; one sentence."""


class ForkServer:
    """Serves one control socket until it closes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, str] = {}
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # readable when a child has ended

    def serve(self) -> None:
        """Spawn on request and report exits; when the control socket closes, end every child and return."""
        wake_read, wake_write = self._wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            self._reply(Ready())
            while True:
                ready, _, _ = select.select([self._control.fileno(), wake_read], [], [])
                if wake_read in ready:
                    with suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                    self._reap()
                if self._control.fileno() in ready and not self._request():
                    return
        except (BrokenPipeError, ConnectionResetError):
            return  # the lab is gone
        finally:
            self._end_children()

    def _request(self) -> bool:
        data, ancillary, flags, _ = self._control.recvmsg(
            MAX_REQUEST_BYTES, socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
        )
        if not data:
            return False
        fds = _descriptors(ancillary)
        host = None
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise SpawnError(f"request exceeds {MAX_REQUEST_BYTES} bytes or {MAX_FDS} file descriptors")
            request = decode_request(data)
            host = request.host
            pid = self._spawn(request, fds)
            self._children[pid] = host
            self._reply(Spawned(host, pid))
        except (SpawnError, msgspec.DecodeError) as error:
            self._reply(Failed(host, str(error)))
        except (OSError, ValueError, RecursionError) as error:
            self._reply(Failed(host, f"{type(error).__name__}: {error}"))
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _spawn(self, request: Spawn, fds: list[int]) -> int:
        names = request.fd_env
        if len(names) != len(fds):
            raise SpawnError(f"{len(fds)} file descriptors came for {len(names)} variables in fd_env")
        threads = sum(1 for _ in Path("/proc/self/task").iterdir())
        if threads != 1:
            raise SpawnError(f"the fork server has {threads} threads: loading the model must not run operations")
        variables = {**request.env, **{name: str(fd) for name, fd in zip(names, fds, strict=True)}}
        birth = _Birth(request, variables)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        report_read, report_write = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            os.close(report_read)
            _child(birth, parent, report_write, [self._control.fileno(), *self._wake], fds)
        os.close(report_write)
        birth.close()
        with os.fdopen(report_read, "rb") as report:
            problem = report.read()
        if problem:
            os.waitpid(pid, 0)
            raise SpawnError(problem.decode())
        return pid

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            host = self._children.pop(pid, None)
            if host is not None:
                self._reply(Exited(host, pid, status))

    def _reply(self, message: Answer) -> None:
        self._control.send(encode(message))

    def _end_children(self) -> None:
        for pid in self._children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + GRACE_S
        while self._children and time.monotonic() < end:
            with suppress(ChildProcessError):
                pid, _ = os.waitpid(-1, os.WNOHANG)
                self._children.pop(pid, None)
                if pid:
                    continue
            time.sleep(0.01)
        for pid in self._children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


class _Birth:
    """Descriptors that a child needs, opened in the server's namespaces, where the paths are known to hold."""

    def __init__(self, request: Spawn, variables: dict[str, str]) -> None:
        self.variables = variables
        self.affinity = request.affinity
        self.nice = request.nice
        self.cgroup = request.cgroup
        self.namespaces: list[tuple[int, int]] = []
        self.log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if request.namespaces_of is not None:
            try:
                for kind, flag in (("net", CLONE_NEWNET), ("mnt", CLONE_NEWNS)):
                    fd = os.open(f"/proc/{request.namespaces_of}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
                    self.namespaces.append((fd, flag))
            except OSError:
                self.close()
                raise

    def close(self) -> None:
        os.close(self.log)
        for fd, _ in self.namespaces:
            os.close(fd)

    def enter(self) -> None:
        """In the child: cgroup, priority, CPUs, then the namespaces, then the log as stdout and stderr."""
        if self.cgroup:
            (Path(self.cgroup) / "cgroup.procs").write_text(str(os.getpid()))
        if self.nice:
            _set_niceness(self.nice)
        if self.affinity:
            os.sched_setaffinity(0, self.affinity)
        for fd, flag in self.namespaces:
            setns(fd, flag)
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(self.log, 1)
        os.dup2(self.log, 2)
        os.close(null)


def _set_niceness(nice: int) -> None:
    """Set the niceness of this process and, with CONFIG_SCHED_AUTOGROUP, of its session: within a group niceness counts
    for nothing outside. Going ahead of others needs a privilege; without it one waits like everybody.
    """
    with suppress(PermissionError):
        os.nice(nice)
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(nice))


def _child(birth: _Birth, parent: int, report: int, close: list[int], keep: list[int]) -> NoReturn:
    """Everything after fork, in the child. Reports a failed birth through the pipe; never returns."""
    status = 1
    try:
        try:
            die_with_parent()
            if os.getppid() != parent:  # died between fork and prctl
                os._exit(1)
            _like_a_fresh_process()
            birth.enter()
            birth.close()
            for fd in close:
                os.close(fd)
            os.environ.update(birth.variables)
        except Exception as error:
            os.write(report, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        os.close(report)
        status = _run_role()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _like_a_fresh_process() -> None:
    """Signals as Python has them at its start. Whoever forked us, or started the fork server, may have had others.

    SIGPIPE above all: at its default, a client that leaves before its answer ends the whole worker.
    """
    signal.set_wakeup_fd(-1)
    ignored = {signal.SIGPIPE, signal.SIGXFSZ}
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError, ValueError):  # the C library keeps two real-time signals to itself
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _run_role() -> int:
    from workers.environment import EnvironmentProblem, read_environment
    from workers.models import ModelError, load_model
    from workers.process import run

    try:
        environment = read_environment()
    except EnvironmentProblem as error:
        print(f"pddbed worker: {error}", file=sys.stderr)
        return 2
    host = msgspec.structs.replace(environment.model, device="cpu")
    try:
        loaded = _loaded.get(host) or load_model(host)  # or else a worker with a model of its own
        if environment.role != "gateway":  # which computes nothing
            loaded = loaded.on(environment.model.device)
    except ModelError as error:
        print(f"pddbed worker: {error}", file=sys.stderr)
        return 1
    return run(environment, loaded)


_loaded: dict[Any, Any] = {}


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def main() -> int:
    """Exit status: 0 control socket closed, 1 the model cannot be loaded, 2 wrong environment."""
    try:
        control = socket.socket(fileno=int(os.environ.pop("PDDBED_FORKSERVER_FD")))
    except (KeyError, ValueError, OSError) as error:
        print(f"pddbed fork server: PDDBED_FORKSERVER_FD must name a control socket ({error})", file=sys.stderr)
        return 2
    # numpy's BLAS would start a thread when it is imported; the workers compute with torch
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # imported here, so that a usage error costs nothing; before fork, so that no child pays for it again
    import workers.process  # noqa: F401
    from workers.environment import EnvironmentProblem, read_model
    from workers.models import ModelError, load_model
    from workers.models.load import check_device

    try:
        spec = read_model()
    except EnvironmentProblem as error:
        print(f"pddbed fork server: {error}", file=sys.stderr)
        return 2
    try:
        # to host memory, whatever the device: a process that has touched an accelerator cannot be forked
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        check_device(spec)
        host = msgspec.structs.replace(spec, device="cpu")
        _loaded[host] = load_model(host)
    except ModelError as error:
        with suppress(OSError):
            control.send(encode(Failed(None, str(error))))
        print(f"pddbed fork server: {error}", file=sys.stderr)
        return 1
    # 200,000 objects of torch: a full collection takes 0.1 s, for which a worker would stand still now and then
    gc.collect()
    gc.freeze()
    ForkServer(control).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
