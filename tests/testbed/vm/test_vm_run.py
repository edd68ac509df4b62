"""`pddbed vm run` from outside: the command sees its arguments and a small Linux, the caller its output and status.

Each boot takes about 5 s, so one boot answers many questions.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from testbed.machine import owned
from testbed.vm.image import VmImage
from testbed.vm.job import KIND

VmRun = Callable[..., subprocess.CompletedProcess[bytes]]
PDDBED = Path(sys.executable).with_name("pddbed")
PROBE = Path(__file__).with_name("guest_probe.py")
ODD_ARGUMENTS = ["two words", "", "it's", 'say "hi"', "$HOME `id` \\", "line\nbreak", "a=b", "*", "ü€", "--json"]


@pytest.fixture
def console(tmp_path: Path, image: VmImage) -> Callable[..., subprocess.Popen[str]]:
    """Start `pddbed vm run` in a cache directory of its own, to be interrupted."""

    def start(*command: str) -> subprocess.Popen[str]:
        (tmp_path / "cache" / "pddbed" / "vm").mkdir(parents=True)
        (tmp_path / "cache" / "pddbed" / "vm" / image.directory.name).symlink_to(image.directory)
        return subprocess.Popen(
            ["nice", "-n", "3", PDDBED, "vm", "run", "--", *command],
            env=os.environ | {"PDDBED_CACHE": str(tmp_path / "cache")},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start


def test_the_command_gets_its_arguments_and_a_small_linux(vm_run: VmRun, tmp_path: Path) -> None:
    marker = tmp_path / "marker with space"  # the project may lie below /tmp, as this file does
    marker.write_text("from the host")
    output = tmp_path / "output"
    result = vm_run(
        *("python", str(PROBE), str(marker), *ODD_ARGUMENTS),
        options=("--output", str(output), "--env", "ODD"),
        environment={"ODD": " a 'b'\n$c\t", "SECRET": "not to be passed on"},
        cwd=marker.parent,
    )
    assert result.returncode == 42, result.stderr.decode()
    assert b"one line of complaint\n" in result.stderr
    assert b"complaint" not in result.stdout
    report = json.loads(result.stdout)
    assert report["argv"] == ODD_ARGUMENTS
    assert report["odd"] == " a 'b'\n$c\t"
    assert report["secret"] is None
    assert report["cwd"] == str(marker.parent)
    assert report["stdin"] == ""
    assert report["uid"] == 0
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    # The overlay: the guest sees the host's file and its own change, the host sees neither.
    assert report["marker_before"] == "from the host"
    assert report["marker_after"] == "changed in the guest"
    assert marker.read_text() == "from the host"
    assert report["pty"].startswith("/dev/pts/")
    assert report["interfaces"] == ["lo"]
    for ability in ("tun", "cgroup", "shm", "netem", "modprobe", "unshare"):
        assert report[ability], ability
    assert {"bbr", "cubic"} <= set(report["congestion"])
    # Files and links come back.
    assert (output / "below" / "file").read_bytes() == bytes(range(256))
    assert (output / "link").readlink() == Path("below/file")


@pytest.mark.nightly
def test_a_time_out_ends_the_command_and_keeps_what_it_had_written(vm_run: VmRun, tmp_path: Path) -> None:
    began = time.monotonic()
    result = vm_run(
        *("bash", "-c", "head -c 300000 /dev/zero; echo said; echo kept > $PDDBED_VM_OUTPUT/file; sleep 600"),
        options=("--timeout", "20", "--output", str(tmp_path)),
    )
    assert result.returncode == 124
    assert result.stdout == b"\0" * 300000 + b"said\n"
    assert (tmp_path / "file").read_text() == "kept\n"
    assert b"time-out after 20 s: the command had not ended" in result.stderr
    assert time.monotonic() - began < 30


def test_a_guest_that_dies_is_125_with_its_last_words(vm_run: VmRun) -> None:
    result = vm_run("bash", "-c", "echo before; sleep 1; echo c > /proc/sysrq-trigger; sleep 60")
    assert result.returncode == 125
    assert result.stdout == b"before\n"
    assert b"Kernel panic" in result.stderr


def test_a_machine_too_large_is_refused_in_qemus_words(vm_run: VmRun) -> None:
    result = vm_run("true", options=("--memory", "12XB"))
    assert result.returncode == 125
    assert b"12XB" in result.stderr


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, marks=pytest.mark.nightly),
        signal.SIGKILL,
    ],
)
def test_ending_the_harness_ends_the_emulator(
    console: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
) -> None:
    process = console("bash", "-c", "echo up; sleep 600")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert [child.name() for child in children] == ["qemu-system-x86_64"]
    autogroup = Path(f"/proc/{children[0].pid}/autogroup")
    if autogroup.exists() and (text := autogroup.read_text()):  # niceness counts between sessions only there
        assert text.split()[-1] == "3"
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    status = process.wait(timeout=20)
    assert status == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    cache = tmp_path / "cache" / "pddbed" / "vm"
    left = list(cache.glob("job-*"))
    if number == signal.SIGKILL:  # nobody could remove the directory; the next run does
        assert len(left) == 1
        owned.sweep(cache, KIND)
        left = list(cache.glob("job-*"))
    assert left == []


def test_a_command_is_required(vm_run: VmRun) -> None:
    assert vm_run().returncode == 2
