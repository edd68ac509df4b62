"""A lab comes up and down the same from whatever surroundings a script has: streams, signals, umask, directories."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_pddbed

pytestmark = pytest.mark.root
TINY = ROOT / "topologies" / "two-dc-tiny.yaml"
PDDBED = f"{sys.executable} -c 'from testbed.cli import main; main(prog_name=\"pddbed\")'"
LAB = "odd"
UP = f"{PDDBED} up {TINY} --name {LAB} --no-workers --no-verify"


@pytest.fixture(autouse=True)
def taken_down(leaves_nothing: None) -> Iterator[None]:
    yield
    assert run_pddbed("down", LAB).returncode == 0


def shell(script: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script of bash; `$?` of its last command is the status."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, cwd=cwd, env=environment)
    assert "Traceback" not in done.stderr
    return done


def is_up() -> bool:
    return run_pddbed("exec", "-l", LAB, "gw0", "--", "true").returncode == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_no_harm(closed: str) -> None:
    assert shell(f"{UP} {closed}").returncode == 0
    assert is_up()
    assert shell(f"{PDDBED} exec -l {LAB} gw0 {closed} -- true").returncode == 0


def test_a_reader_that_goes_away_does_not_end_the_lab() -> None:
    assert shell(f"set -o pipefail; {UP} | true").returncode == 0
    assert is_up()
    assert run_pddbed("down", LAB).returncode == 0
    assert shell(f"{UP} 2> >(true)").returncode == 0
    assert is_up()


def test_output_that_cannot_be_written_is_said_in_a_sentence_and_the_lab_is_up() -> None:
    done = shell(f"{UP} >/dev/full")
    assert done.returncode == 1
    assert f'lab "{LAB}" is up' in done.stderr
    assert is_up()
    for command in (f"status -l {LAB}", "ps", "schema", "--help"):
        refused = shell(f"{PDDBED} {command} >/dev/full")
        assert (refused.returncode, refused.stderr.count("No space left on device")) == (1, 1), command


def test_a_lab_holds_none_of_its_callers_pipes() -> None:
    """Else the reader of a pipe, `$(pddbed up ...)` above all, would wait until the lab ends."""
    done = shell(f"exec 7> >(cat; echo the pipe is closed); x=$({UP}); exec 7>&-; wait $!; echo $x")
    assert done.stdout.startswith("the pipe is closed")
    assert "is up" in done.stdout


def test_an_ignored_sigchld_hides_no_status_and_the_guardian_still_sweeps() -> None:
    assert shell(f"env --ignore-signal=CHLD {UP}").returncode == 0
    assert shell(f"env --ignore-signal=CHLD {PDDBED} exec -l {LAB} gw0 -- sh -c 'exit 7'").returncode == 7
    shell(f"env --ignore-signal=CHLD {PDDBED} exec -l {LAB} gw0 -- kill -9 2")  # the supervisor
    deadline = time.monotonic() + 5
    while Path("/run/pddbed", LAB).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_signals_that_the_caller_blocks_still_end_the_lab() -> None:
    assert shell(f"env --block-signal {UP}").returncode == 0
    assert is_up()


@pytest.mark.parametrize("umask", ["000", "077"])
def test_records_can_be_read_by_all_and_written_by_the_owner_whatever_the_umask(umask: str) -> None:
    assert shell(f"umask {umask}; {UP}").returncode == 0
    record = Path("/run/pddbed", LAB)
    for path in [record, *record.rglob("*")]:
        mode = path.stat().st_mode & 0o777
        assert mode & 0o022 == 0, path
        assert path.is_socket() or mode & 0o444 == 0o444, path


def test_a_working_directory_that_is_gone_is_no_obstacle(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"cd {gone}; rmdir {gone}; {UP}; {PDDBED} exec -l {LAB} gw0 -- pwd"
    assert shell(script).stdout.splitlines()[-1] == "/"


def test_files_in_the_working_directory_are_not_taken_for_modules(tmp_path: Path) -> None:
    for name in ("json", "pyroute2", "torch", "workers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(99)\n")
    command = [str(Path(sys.executable).with_name("pddbed")), "up", str(TINY), "--name", LAB, "--api", "auto"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_exported_tmout_does_not_end_the_shells_that_hold_the_network() -> None:
    assert shell(UP, TMOUT="1", PROMPT_COMMAND="echo prompt").returncode == 0
    time.sleep(1.5)
    assert is_up()


def test_a_low_soft_limit_on_open_files_is_raised_and_a_low_hard_one_named(tmp_path: Path) -> None:
    hosts = "".join(f"      h{number}: {{}}\n" for number in range(60))
    file = tmp_path / "many.yaml"
    file.write_text(f"datacenters:\n  main:\n    subnet: 10.1.0.0/24\n    hosts:\n{hosts}")
    many = f"{PDDBED} up {file} --name {LAB} --no-verify"
    refused = shell(f"ulimit -n 80; {many}")
    assert refused.returncode == 1
    assert "ulimit -n" in refused.stderr
    assert shell(f"ulimit -Sn 80; {many}").returncode == 0


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("mount -t tmpfs -o mode=755,size=4k none /run/pddbed", "No space left"),
        ("mount -t tmpfs -o mode=755,nr_inodes=7 none /run/pddbed", "No space left"),
        ("mount -t tmpfs -o mode=755,ro none /run/pddbed", "Read-only file system"),
        ("mount -t tmpfs -o mode=777 none /run/pddbed", "nobody else can write to"),
        ("mount -t tmpfs none /run; touch /run/pddbed", "/run/pddbed"),
        ("mount -t tmpfs none /run; ln -s /tmp /run/pddbed", "/run/pddbed"),
    ],
)
def test_where_records_cannot_be_kept_up_says_so_and_leaves_nothing(trouble: str, words: str) -> None:
    Path("/run/pddbed").mkdir(exist_ok=True)
    done = shell(f"unshare --mount sh -c '{trouble}; exec \"$@\"' sh {UP}")
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]


def test_a_machine_without_a_hosts_file_is_told_to_make_one(tmp_path: Path) -> None:
    for name in ("passwd", "group", "nsswitch.conf", "ld.so.cache"):
        (tmp_path / name).write_bytes(Path("/etc", name).read_bytes())
    done = shell(f"unshare --mount sh -c 'mount --bind {tmp_path} /etc; exec \"$@\"' sh {UP}")
    assert done.returncode == 1
    assert "touch /etc/hosts" in done.stderr


def test_down_from_inside_a_lab_that_does_not_answer_kills_nothing_of_its_caller() -> None:
    assert shell(UP).returncode == 0
    inside = f"kill -STOP 2; {PDDBED} down {LAB}; echo alive"  # 2 is the supervisor, whose guardian is outside
    done = shell(f"{PDDBED} exec -l {LAB} gw0 -- sh -c {shlex.quote(inside)}")
    assert "not of this PID namespace" in done.stderr
    assert done.stdout == "alive\n"
