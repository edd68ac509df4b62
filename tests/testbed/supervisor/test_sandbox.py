"""A lab leaves nothing, however it ends. Real namespaces; the network only, so that each case takes a second."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testbed.machine import owned
from tests.conftest import ROOT, run_pddbed, traces_of_labs

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("leaves_nothing")]
TOPOLOGY = ROOT / "topologies" / "two-dc-tiny.yaml"


def processes_named(name: str, lab: str) -> list[int]:
    """Processes of a lab by their comm; PID 1 and the supervisor keep the command line of `up`."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            comm, command = (directory / "comm").read_text().strip(), (directory / "cmdline").read_bytes()
        except OSError:
            continue
        if comm == name and lab.encode() in command:
            found.append(int(directory.name))
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def up(name: str) -> None:
    result = run_pddbed("up", str(TOPOLOGY), "--name", name, "--no-workers")
    assert result.returncode == 0, result.stderr


def wait_until_gone(lab: str) -> None:
    deadline = time.monotonic() + 5
    while Path(f"/run/pddbed/{lab}").exists():
        assert time.monotonic() < deadline, f"the record of {lab} was not swept"
        time.sleep(0.02)


@pytest.mark.parametrize("victim", ["pddbed-lab", "pddbed-init"])
def test_killing_the_supervisor_or_its_pid_1_leaves_nothing(victim: str) -> None:
    up("killed")
    (pid,) = processes_named(victim, "killed")
    os.kill(pid, signal.SIGKILL)
    wait_until_gone("killed")
    assert run_pddbed("down", "killed").returncode == 0
    up("killed")
    assert run_pddbed("down", "killed").returncode == 0


def test_killing_the_guardian_ends_the_lab_and_the_next_command_sweeps_its_record() -> None:
    up("orphan")
    (init,) = processes_named("pddbed-init", "orphan")
    os.kill(parent_of(init), signal.SIGKILL)
    deadline = time.monotonic() + 5
    while processes_named("pddbed-lab", "orphan"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "orphan" not in run_pddbed("ps").stdout
    wait_until_gone("orphan")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_guardian_ends_the_lab_and_sweeps(number: int) -> None:
    up("asked")
    (init,) = processes_named("pddbed-init", "asked")
    os.kill(parent_of(init), number)
    wait_until_gone("asked")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_lab_in_the_foreground_ends_with_its_command_however_that_ends(number: int) -> None:
    command = [sys.executable, "-c", "from testbed.cli import main; main()", "up", str(TOPOLOGY), "--name", "front"]
    process = subprocess.Popen([*command, "--no-workers", "--foreground"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "Ctrl-C takes the lab down" not in (line := process.stderr.readline()):
        assert line, "the command ended too early"
    process.send_signal(number)
    assert process.wait(timeout=20) == (-number if number == signal.SIGKILL else 0)
    wait_until_gone("front")


def test_a_lab_whose_record_was_removed_ends_and_spares_the_next_one_of_its_name() -> None:
    up("lost")
    (old,) = processes_named("pddbed-lab", "lost")
    shutil.rmtree("/run/pddbed/lost")
    up("lost")
    deadline = time.monotonic() + 5
    while Path(f"/proc/{old}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)  # the old lab's guardian has nothing left to do by now
    assert run_pddbed("exec", "-l", "lost", "gw0", "--", "true").returncode == 0
    assert run_pddbed("down", "lost").returncode == 0


def test_records_of_dead_labs_are_swept_however_odd_and_no_link_is_followed_out(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    root = Path("/run/pddbed")
    root.mkdir(exist_ok=True)
    for name in ("swept-dir", "swept-fifo", ".swept-half.1.2"):
        (root / name).mkdir()
        owned.mark(root / name, "lab record", name.strip(".").removesuffix(".1.2"))
    (root / "swept-dir" / "guardian.lock").mkdir()
    (root / "swept-dir" / "logs").symlink_to(tmp_path)
    os.mkfifo(root / "swept-fifo" / "guardian.lock")
    assert run_pddbed("ps", timeout_s=10).returncode == 0
    assert not [path for path in root.iterdir() if "swept-" in path.name]
    assert (tmp_path / "kept").exists()


def test_an_empty_directory_by_a_labs_name_is_taken_over() -> None:
    place = Path("/run/pddbed/littered")
    place.mkdir(parents=True)
    up("littered")
    assert run_pddbed("down", "littered").returncode == 0
    assert not place.exists()


@pytest.mark.parametrize("content", [b"garbage", b"[1]", b'{"started": "x", "hosts": {}}', b"\xff\xfe"])
def test_a_state_file_that_was_tampered_with_is_no_obstacle(content: bytes) -> None:
    up("tampered")
    Path("/run/pddbed/tampered/state.json").write_bytes(content)
    for command in (["ps"], ["ps", "--json"], ["status", "-l", "tampered"], ["down", "tampered"]):
        result = run_pddbed(*command)
        assert result.returncode == 0, result.stderr
    wait_until_gone("tampered")


def test_a_host_whose_shell_was_killed_is_shown_as_gone_and_refused() -> None:
    up("hollow")
    shell = """kill -9 $(pgrep -f '^bash .* pddbed-node:d1h0$')"""
    assert run_pddbed("exec", "-l", "hollow", "md0", "--", "sh", "-c", shell).returncode == 0
    result = run_pddbed("exec", "-l", "hollow", "md0", "--", "true")
    assert result.returncode == 1
    assert '"md0" is gone' in result.stderr
    shown = run_pddbed("status", "-l", "hollow")
    assert shown.returncode == 0, shown.stderr
    assert "gone" in next(line for line in shown.stdout.splitlines() if line.startswith("md0"))
    deadline = time.monotonic() + 5
    while "md0 is gone" not in run_pddbed("ps").stdout:
        assert time.monotonic() < deadline
    assert "md0 is gone" in run_pddbed("status", "-l", "hollow").stdout
    assert next(lab for lab in json.loads(run_pddbed("ps", "--json").stdout) if lab["name"] == "hollow")["lost"][
        "md0"
    ].startswith("is gone")
    measured = json.loads(run_pddbed("verify", "-l", "hollow", "--quick", "--json").stdout)
    assert "md0 is gone" in " ".join(measured["reasons"])
    assert not measured["faithful"]
    assert run_pddbed("down", "hollow").returncode == 0


@pytest.mark.parametrize("victim", ["pddbed-lab", "pddbed-init", "pddbed-guard"])
def test_a_stopped_process_of_the_lab_does_not_stop_down(victim: str) -> None:
    up("frozen")
    (pid,) = processes_named(victim, "frozen")
    os.kill(pid, signal.SIGSTOP)
    result = run_pddbed("down", "frozen")
    assert result.returncode == 0, result.stderr
    wait_until_gone("frozen")


@pytest.mark.parametrize("delay_s", [0.05, 0.2, 0.4, 0.6])
def test_interrupting_up_at_any_moment_leaves_nothing(delay_s: float) -> None:
    command = [sys.executable, "-c", "from testbed.cli import main; main()", "up", str(TOPOLOGY), "--name", "cut"]
    process = subprocess.Popen([*command, "--api", "auto"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert not processes_named("pddbed-lab", "cut")


def test_killing_up_while_it_builds_takes_the_lab_down() -> None:
    command = [sys.executable, "-c", "from testbed.cli import main; main()", "up", str(TOPOLOGY), "--name", "torn"]
    process = subprocess.Popen(
        [*command, "--api", "auto"], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 20
    while not processes_named("pddbed-lab", "torn"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    wait_until_gone("torn")


def test_a_command_inside_a_host_dies_with_the_lab() -> None:
    up("inside")
    command = [sys.executable, "-c", "from testbed.cli import main; main()", "exec", "-l", "inside", "md0", "--"]
    process = subprocess.Popen([*command, "sleep", "60"], cwd=ROOT)
    deadline = time.monotonic() + 10
    while not any(
        "sleep" in line for line in run_pddbed("exec", "-l", "inside", "gw0", "ps", "-eo", "comm").stdout.split()
    ):
        assert time.monotonic() < deadline
    (pid,) = processes_named("pddbed-lab", "inside")
    os.kill(pid, signal.SIGKILL)
    assert process.wait(timeout=10) == 128 + signal.SIGKILL
    wait_until_gone("inside")


def test_down_of_one_lab_leaves_the_other_alone() -> None:
    up("left")
    up("right")
    assert run_pddbed("down", "left").returncode == 0
    assert run_pddbed("exec", "-l", "right", "gw0", "--", "ping", "-c", "1", "-W", "5", "md0").returncode == 0
    assert run_pddbed("down", "right").returncode == 0


def test_a_name_that_is_taken_is_refused_and_the_running_lab_stays() -> None:
    up("taken")
    result = run_pddbed("up", str(TOPOLOGY), "--name", "taken", "--no-workers")
    assert result.returncode == 1
    assert '"taken" is already up' in result.stderr
    assert run_pddbed("exec", "-l", "taken", "gw0", "--", "true").returncode == 0
    assert run_pddbed("down", "taken").returncode == 0


def test_down_is_idempotent() -> None:
    for _ in range(2):
        result = run_pddbed("down", "never-was")
        assert result.returncode == 0
        assert '"never-was" is not up' in result.stdout


def test_a_lab_touches_nothing_of_the_machines_network() -> None:
    def machine() -> str:
        shown = [["ip", "-d", "addr"], ["ip", "route", "show", "table", "all"], ["ip", "neigh"]]
        return "".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in shown)

    before, limits = machine(), Path("/proc/sys/fs/file-max").read_text()
    up("quiet")
    during = machine()
    assert run_pddbed("down", "quiet").returncode == 0
    assert before == during
    assert Path("/proc/sys/fs/file-max").read_text() == limits


def test_the_check_for_leaks_sees_a_leak() -> None:
    """`leaves_nothing` is only worth what it can see: while a lab is up, every kind of trace but mounts shows."""
    before = traces_of_labs()
    up("seen")
    during = traces_of_labs()
    assert run_pddbed("down", "seen").returncode == 0
    for kind in ("guardians", "PID namespaces", "network namespaces", "records"):
        assert during[kind] - before[kind], f"no trace of a running lab among {kind}"
