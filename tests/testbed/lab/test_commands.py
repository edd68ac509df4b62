"""`command:` hosts: exit statuses, logs, environment, CPUs, publish; and `exec`, which ends with its caller."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Lab, run_pddbed

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("leaves_nothing")]

SERVER = """\
import socket, threading
def count(client):
    total = 0
    while data := client.recv(65536):
        total += len(data)
    client.sendall(b"%d" % total)
    client.close()
server = socket.create_server(("0.0.0.0", 9000))
while True:
    client, _ = server.accept()
    threading.Thread(target=count, args=(client,)).start()
"""
TOPOLOGY = """\
datacenters:
  main:
    subnet: 10.1.0.0/24
    hosts:
      fails: {{command: "echo said; printf unfinished; exit 7"}}
      missing: {{command: "no-such-program [/x] --option"}}
      ended: {{command: "kill -9 $$"}}
      server: {{command: "exec {python} server.py", publish: [127.0.0.1:{open}:9000, 127.0.0.1:{closed}:9001]}}
      tells: {{command: "env; exec sleep 600", environment: {{OWN: set in the file}}}}
      spins: {{command: "exec {python} -c 'while True: pass'", cpu: {{quota: 30%, affinity: [0]}}}}
  remote: {{subnet: 10.2.0.0/24, hosts: {{far: {{}}}}}}
wan: [{{name: w0, between: [main, remote], delay: 1ms}}]
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@pytest.fixture
def raised(raise_lab: Callable[..., Lab], tmp_path: Path) -> tuple[Lab, int, int]:
    """The lab above, and two ports of this machine: something listens behind the first only."""
    ports = free_port(), free_port()
    file = tmp_path / "commands.yaml"
    file.write_text(TOPOLOGY.format(python=sys.executable, open=ports[0], closed=ports[1]))
    (tmp_path / "server.py").write_text(SERVER)
    return (raise_lab(file, "commands", "--no-verify"), *ports)


def hosts(lab: Lab) -> dict[str, dict[str, Any]]:
    return {host["name"]: host for host in lab.status()["hosts"]}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def log(lab: Lab, host: str) -> str:
    return run_pddbed("logs", "-l", lab.name, host).stdout


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_commands_from_start_to_end(raised: tuple[Lab, int, int]) -> None:
    lab, listening, closed = raised
    wait_for(lambda: all(hosts(lab)[name]["state"] == "exited" for name in ("fails", "missing", "ended")))
    statuses = {name: hosts(lab)[name]["exit_status"] for name in ("fails", "missing", "ended")}
    assert statuses == {"fails": 7, "missing": 127, "ended": -9}
    assert hosts(lab)["server"]["state"] == "running"
    shown = run_pddbed("status", "-l", lab.name)
    assert shown.returncode == 0, shown.stderr
    assert "no-such-program [/x] --option" in shown.stdout

    assert log(lab, "fails") == "said\nunfinished\n"

    environment = dict(line.split("=", 1) for line in log(lab, "tells").splitlines() if line.startswith("PDDBED_"))
    assert environment["PDDBED_HOST"] == "tells"
    peers = {peer["name"]: peer for peer in json.loads(environment["PDDBED_PEERS"])}
    assert peers["far"]["datacenter"] == "remote"
    assert peers["server"]["port"] == 9000
    for command in (["exec", "tells", "env"], ["shell", "tells"]):
        entered = run_pddbed(command[0], "-l", lab.name, *command[1:], input="exec env\n")
        inside = dict(
            line.split("=", 1) for line in entered.stdout.splitlines() if line.startswith(("PDDBED_", "OWN="))
        )
        assert inside == environment | {"OWN": "set in the file"}, command
    assert "PDDBED_HOST" not in lab.exec("router.main", "env").stdout

    with socket.create_connection(("127.0.0.1", listening), timeout=10) as client:
        client.sendall(bytes(3_000_000))
        client.shutdown(socket.SHUT_WR)  # half-closed: the answer still comes
        assert client.recv(100) == b"3000000"
        assert client.recv(100) == b""
    with socket.create_connection(("127.0.0.1", closed), timeout=10) as client:
        assert client.recv(100) == b""
    refused = run_pddbed("up", lab.status()["file"], "--name", "commands-too", "--no-verify")
    assert refused.returncode == 1
    assert f"127.0.0.1:{listening}" in refused.stderr
    assert '"server"' in refused.stderr


def test_quota_and_affinity_hold_and_the_cgroup_goes_with_a_killed_lab(raised: tuple[Lab, int, int]) -> None:
    lab, *_ = raised
    processes = (Path("/proc") / name for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    (pid,) = [int(p.name) for p in processes if (p / "cmdline").exists() and b"while True: pass" in _cmdline(p)]
    assert os.sched_getaffinity(pid) == {0}
    before, began = cpu_seconds(pid), time.monotonic()
    time.sleep(3)
    share = (cpu_seconds(pid) - before) / (time.monotonic() - began)
    assert 0.03 < share < 0.35
    assert lab.exec("far", "kill", "-9", "2").returncode in (0, 137)  # the supervisor
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    wait_for(lambda: not Path("/run/pddbed", lab.name).exists())


def _cmdline(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_command_inside_a_host_ends_with_the_exec_that_runs_it(number: int, raise_lab: Callable[..., Lab]) -> None:
    lab = raise_lab(ROOT / "topologies" / "two-dc-tiny.yaml", "passing", "--no-workers", "--no-verify")
    command = [sys.executable, "-c", "from testbed.cli import main; main()", "exec", "-l", lab.name, "md0", "--"]
    process = subprocess.Popen([*command, "sh", "-c", "echo began; exec sleep 86401"], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"began\n"
    process.send_signal(number)
    assert process.wait(timeout=10) == (-number if number == signal.SIGKILL else 128 + number)
    process.stdout.close()
    wait_for(lambda: lab.exec("gw0", "pgrep", "-f", "^sleep 86401").returncode == 1)


def test_a_command_that_cannot_be_run_has_the_shells_status() -> None:
    result = run_pddbed("up", str(ROOT / "topologies" / "two-dc-tiny.yaml"), "--name", "norun", "--no-workers")
    assert result.returncode == 0, result.stderr
    lab = Lab("norun")
    try:
        assert lab.exec("md0", "no-such-program").returncode == 127
        assert lab.exec("md0", "/etc").returncode == 126
        assert lab.exec("md0", "/etc/passwd").stderr == "pddbed: /etc/passwd: Permission denied\n"
    finally:
        assert run_pddbed("down", "norun").returncode == 0
