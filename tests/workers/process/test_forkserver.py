"""The fork server: births into namespaces, and what it says when one fails or ends."""

import array
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Server:
    """A fork server and our end of its control socket."""

    def __init__(self, log: Path, **options: Any) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(60)
        with theirs, log.open("wb") as out:
            environment = {
                **os.environ,
                "PDDBED_FORKSERVER_FD": str(theirs.fileno()),
                "PDDBED_MODEL": '{"name": "tiny"}',
            }
            self.process = subprocess.Popen(
                [sys.executable, "-m", "workers.forkserver"],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdout=out,
                stderr=out,
                **options,
            )
        assert self.receive() == {"op": "ready", "ready": True}

    def receive(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.control.recv(1 << 16))
        return answer

    def ask(self, request: dict[str, Any], *fds: int) -> dict[str, Any]:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.control.sendmsg([json.dumps(request).encode()], ancillary)
        return self.receive()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("forkserver") / "log")
    yield running
    running.control.close()
    assert running.process.wait(10) == 0


def worker_environment(**changes: str) -> dict[str, str]:
    """A relay decode that waits for peers which never come."""
    return {
        "PDDBED_HOST": "rld0",
        "PDDBED_ROLE": "relay-decode",
        "PDDBED_ADDRESS": "127.0.0.1",
        "PDDBED_SECRET": "00" * 32,
        "PDDBED_MODEL": '{"name": "tiny"}',
        "PDDBED_KV_BYTES": str(1 << 20),
        **changes,
    }


def spawn(server: Server, tmp_path: Path, **request: Any) -> tuple[dict[str, Any], bytes]:
    """Start the worker and wait until it says that it serves."""
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    with ours, theirs:
        answer = server.ask(
            {"op": "spawn", "host": "rld0", "env": worker_environment(), "log": str(tmp_path / "log"), **request,
             "fd_env": ["PDDBED_READY_FD"]},
            theirs.fileno(),
        )  # fmt: skip
        theirs.close()
        ready = ours.recv(16) if answer["op"] == "spawned" else b""
        if ready:
            assert ours.recv(16) == b"", "the worker has closed it"
        return answer, ready


def test_a_worker_is_born_serves_and_its_end_is_told(server: Server, tmp_path: Path) -> None:
    answer, ready = spawn(server, tmp_path, affinity=[0])
    assert ready == b"ready\n"
    pid = answer["pid"]
    assert os.sched_getaffinity(pid) == {0}
    os.kill(pid, signal.SIGTERM)
    exited = server.receive()
    assert exited == {"op": "exited", "host": "rld0", "pid": pid, "status": 0}
    assert "rld0 (relay-decode) is serving" in (tmp_path / "log").read_text()


STATUS = ("SigBlk", "SigIgn", "SigCgt", "Umask", "Threads", "Cpus_allowed", "NoNewPrivs", "CapEff", "Seccomp")


def inherited(pid: int) -> dict[str, Any]:
    """What a process has from whoever started it: signals, limits, priority, descriptors."""
    place = Path(f"/proc/{pid}")
    status = dict(line.split(":\t", 1) for line in (place / "status").read_text().splitlines())
    opened = [str(fd.readlink()) for fd in (place / "fd").iterdir()]
    return {
        **{name: status[name] for name in STATUS},
        "descriptors": Counter(name.split(":")[0] for name in opened),
        "limits": (place / "limits").read_text(),
        "nice": os.getpriority(os.PRIO_PROCESS, pid),
        "oom": (place / "oom_score_adj").read_text(),
        "cwd": (place / "cwd").readlink(),
    }


def spoil_signals() -> None:
    """As a service manager, `nohup` and a careless parent leave them."""
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR2, signal.SIGCHLD))


def test_a_forked_worker_inherits_what_a_fresh_one_does(tmp_path: Path) -> None:
    """SIGPIPE at its default once let a client that leaves end the worker."""
    (tmp_path / "log").touch()
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    with ours, theirs, (tmp_path / "log").open("ab") as log:
        fresh = subprocess.Popen(
            [sys.executable, "-m", "workers"],
            env={
                **os.environ,
                **worker_environment(PDDBED_READY_FD=str(theirs.fileno())),
                "OPENBLAS_NUM_THREADS": "1",  # as the fork server has it; a thread of it would show
            },
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        theirs.close()
        assert ours.recv(16) == b"ready\n"
        assert ours.recv(16) == b"", "the worker has closed it"
    try:
        expected = inherited(fresh.pid)
    finally:
        fresh.kill()
        fresh.wait()
    server = Server(tmp_path / "server.log", preexec_fn=spoil_signals)
    answer, ready = spawn(server, tmp_path)
    assert ready == b"ready\n"
    assert inherited(answer["pid"]) == expected
    server.control.close()
    assert server.process.wait(10) == 0


@pytest.mark.root
def test_a_worker_is_born_into_the_namespaces_of_a_process(server: Server, tmp_path: Path) -> None:
    place = subprocess.Popen(["unshare", "--net", "--mount", "sleep", "60"])
    try:
        while namespace(place.pid, "mnt") == namespace("self", "mnt"):
            time.sleep(0.01)
        # loopback is down in a new namespace, but an address of it can be listened on
        answer, ready = spawn(server, tmp_path, namespaces_of=place.pid)
        assert ready == b"ready\n"
        for kind in ("net", "mnt"):
            assert namespace(answer["pid"], kind) == namespace(place.pid, kind)
        os.kill(answer["pid"], signal.SIGKILL)
        assert server.receive()["status"] == signal.SIGKILL
    finally:
        place.kill()
        place.wait()


def test_a_worker_that_cannot_start_ends_with_status_one_and_one_sentence(server: Server, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer, _ = spawn(server, tmp_path, env=worker_environment(PDDBED_PORT=str(port)))
    assert server.receive() == {"op": "exited", "host": "rld0", "pid": answer["pid"], "status": 1 << 8}
    log = (tmp_path / "log").read_text()
    assert f"pddbed worker: rld0 cannot listen on 127.0.0.1:{port}: Address already in use" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"op": "dance", "host": "x"}, "Invalid value 'dance' - at `$.op`"),
        ({"op": "spawn", "host": "x"}, "missing required field `env`"),
        ({"op": "spawn", "host": "x", "env": {}, "log": "/nonexistent/log"}, "No such file"),
        ({"op": "spawn", "host": "x", "env": {}, "log": "/dev/null", "namespaces_of": 2**22 + 1}, "No such file"),
        ({"op": "spawn", "host": "x", "env": {}, "log": "/dev/null", "cgroup": "/nonexistent"}, "No such file"),
        ({"op": "spawn", "host": "x", "env": {}, "log": "/dev/null", "affinity": [9999]}, "Invalid argument"),
        ({"op": "spawn", "host": "x", "env": {}, "log": "/dev/null", "fd_env": ["A"]}, "0 file descriptors came for 1"),
        ([1, 2], "Expected `object`, got `array`"),
        ({"op": "spawn", "host": "x", "env": {}, "log": "/dev/null", "nice": 20}, "<= 19 - at `$.nice`"),
        ({"op": "spawn", "host": "x", "env": {}, "log": 5}, "Expected `str`, got `int` - at `$.log`"),
        ({"op": "spawn", "host": "x", "env": {}, "log": "/dev/null", "dance": 1}, "unknown field `dance`"),
    ],
)
def test_a_request_that_fails_is_answered_and_the_server_goes_on(server: Server, request_: Any, message: str) -> None:
    answer = server.ask(request_)
    assert answer["op"] == "error"
    assert message in answer["message"]


def test_its_children_end_with_it(tmp_path: Path) -> None:
    server = Server(tmp_path / "server.log")
    first, _ = spawn(server, tmp_path)
    os.kill(first["pid"], signal.SIGSTOP)  # deaf to SIGTERM
    second, _ = spawn(server, tmp_path)
    server.control.close()
    assert server.process.wait(10) == 0
    assert not Path(f"/proc/{first['pid']}").exists()
    assert not Path(f"/proc/{second['pid']}").exists()


def test_its_children_do_not_outlive_a_killed_server(tmp_path: Path) -> None:
    server = Server(tmp_path / "server.log")
    answer, _ = spawn(server, tmp_path)
    server.process.kill()
    server.process.wait()
    deadline = time.monotonic() + 5
    while _runs(answer["pid"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.control.close()


def namespace(pid: int | str, kind: str) -> Path:
    return Path(f"/proc/{pid}/ns/{kind}").readlink()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_server_without_its_socket_says_so() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PDDBED_FORKSERVER_FD"}
    result = subprocess.run(
        [sys.executable, "-m", "workers.forkserver"], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "PDDBED_FORKSERVER_FD must name a control socket" in result.stderr


def test_what_workers_inherit_is_not_searched_for_garbage() -> None:
    """A full collection of torch's objects takes 0.1 s, in which a paced worker is late."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = (
        "import gc, workers.forkserver as server\n"
        "server.ForkServer.serve = lambda self: print(gc.get_freeze_count())\n"
        "server.main()"
    )
    with ours, theirs:
        environment = {**os.environ, "PDDBED_FORKSERVER_FD": str(theirs.fileno()), "PDDBED_MODEL": '{"name": "tiny"}'}
        command = [sys.executable, "-c", code]
        said = subprocess.check_output(command, env=environment, pass_fds=[theirs.fileno()], timeout=120)
    assert int(said) > 100_000
