"""Whose lab is alive, and whom `down` may signal. What could go wrong would end every process of the machine, so each
case runs in a PID namespace of its own.
"""

import pytest

from testbed.lab.origin import Origin, own_origin
from tests.testbed.lab.apart import run_apart

pytestmark = pytest.mark.root

HEAD = """
import fcntl, os, signal, subprocess, sys, time
from pathlib import Path
from testbed.lab.record import (ROOTS_LABS, LabError, Record, create_record, find_record,
    live_records, registry, sweep_dead)
from testbed.supervisor import start

victim = subprocess.Popen(["sleep", "600"])

def made(name):
    with registry() as root:
        return create_record(root, name)

def held_by(record, how, uid=0):
    "A process of `uid` that holds a lock of the kind `how` on the lock file."
    record.lock_file.touch(mode=0o644)
    program = '''
import fcntl, os, struct, sys, time
os.setuid(int(sys.argv[3]))
fd = os.open(sys.argv[1], os.O_RDWR if os.geteuid() == 0 else os.O_RDONLY)
if sys.argv[2].startswith("ofd"):
    kind = fcntl.F_WRLCK if sys.argv[2] == "ofd-write" else fcntl.F_RDLCK
    fcntl.fcntl(fd, 37, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))  # F_OFD_SETLK
elif sys.argv[2] == "flock":
    fcntl.flock(fd, fcntl.LOCK_SH)
else:
    fcntl.lockf(fd, fcntl.LOCK_EX if sys.argv[2] == "write" else fcntl.LOCK_SH)
print("held", flush=True)
time.sleep(600)
'''
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(record.lock_file), how, str(uid)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\\n"
    return holder

def lives(*processes):
    time.sleep(0.2)
    assert [process.poll() for process in processes] == [None] * len(processes)
"""


def check(program: str, **variables: str) -> None:
    done = run_apart(HEAD + program, **variables)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["ofd-write", "ofd-read", "flock"])
def test_a_lock_of_an_open_file_makes_no_lab_alive_and_ends_nobody(how: str) -> None:
    check(f"""
record = made("held")
holder = held_by(record, "{how}")
assert record.guardian_pid() is None
start.down(record)
lives(victim, holder)
assert not record.directory.exists()
""")


@pytest.mark.parametrize("how", ["read", "ofd-read", "flock"])
def test_a_reader_of_another_user_is_no_guardian(how: str) -> None:
    check(f"""
record = made("read")
holder = held_by(record, "{how}", uid=65534)
assert record.guardian_pid() is None
assert live_records() == []
start.down(record)
lives(victim, holder)
assert sweep_dead() == [] and not record.directory.exists()
""")


@pytest.mark.parametrize("pid", [-1, 0, -7])
def test_no_number_below_1_is_signalled(pid: int) -> None:
    check(f"""
record = made("odd")
assert record.signal_guardian({pid}, signal.SIGTERM) is False
lives(victim)
Record.guardian_pid = lambda self: {pid}
start.GRACE_S = 0.2
try:
    start.down(record)
except LabError as error:
    assert "PID namespace" in str(error)
lives(victim)
""")


def test_a_process_that_no_longer_holds_the_lock_is_not_signalled() -> None:
    check("""
record = made("gone")
record.lock_file.touch()
assert record.signal_guardian(victim.pid, signal.SIGKILL) is False  # its number is another's now
lives(victim)
holder = held_by(record, "write")
assert record.guardian_pid() == holder.pid
assert record.signal_guardian(holder.pid, signal.SIGKILL) is True
assert holder.wait(5) == -9
lives(victim)
""")


def test_records_that_others_could_have_written_are_nobodys() -> None:
    check("""
record = made("planted")
holder = held_by(record, "write")
assert [r.name for r in live_records()] == ["planted"]
for mode, uid in ((0o777, 0), (0o775, 0), (0o755, 65534)):
    ROOTS_LABS.chmod(mode); os.chown(ROOTS_LABS, uid, uid)
    assert live_records() == [], (mode, uid)
ROOTS_LABS.chmod(0o755); os.chown(ROOTS_LABS, 0, 0)
os.chown(record.lock_file, 65534, 65534)
assert live_records() == []
os.chown(record.lock_file, 0, 0)
assert [r.name for r in live_records()] == ["planted"]
lives(victim, holder)
""")


def test_what_is_no_record_is_neither_swept_nor_overwritten_wherever_records_are_kept() -> None:
    """A user whose XDG_RUNTIME_DIR is their home may have a checkout called pddbed there."""
    check("""
os.environ["XDG_RUNTIME_DIR"] = "/run/home"
theirs = Path("/run/home/pddbed")
(theirs / ".git" / "objects").mkdir(parents=True)
(theirs / "docs").mkdir()
for file in ("README.md", "docs/structure.md", ".git/HEAD"):
    (theirs / file).write_text("of somebody")
Path("/run/home/outside").mkdir()
(theirs / "link").symlink_to("/run/home/outside")
for path in (Path("/run/home"), *Path("/run/home").rglob("*")):
    os.chown(path, 1000, 1000, follow_symlinks=False)
before = sorted(Path("/run/home").rglob("*"))
os.setegid(1000); os.seteuid(1000)
assert sweep_dead() == []
for name in ("docs", "README.md", "link"):
    try:
        made(name)
    except LabError as error:
        assert "in the way" in str(error)
    else:
        raise AssertionError(name)
mine = made("lab")
assert sweep_dead() == ["lab"]
assert sorted(path for path in Path("/run/home").rglob("*") if path.name != ".lock") == before
""")


BARE = """
MAIN = "from testbed.cli import main; main(prog_name='pddbed')"

def pddbed(*words, **variables):
    return subprocess.run([sys.executable, "-c", MAIN, *words], capture_output=True, text=True,
        stdin=subprocess.DEVNULL, env=os.environ | variables)

def up(name, **variables):
    done = pddbed("up", "topologies/two-dc-tiny.yaml", "--name", name, "--no-workers", "--no-verify", **variables)
    assert done.returncode == 0, done.stderr

def alive():
    return [record.name for record in live_records()]
"""


def test_a_bare_down_ends_the_users_own_lab_and_says_which() -> None:
    check(
        BARE
        + """
up("mine")
shown = pddbed("wan", "set", "wan0", "--delay", "3ms")
assert 'lab "mine"' in shown.stderr and "two-dc-tiny.yaml" in shown.stderr, shown.stderr
assert 'lab "mine"' in pddbed("wan", "reset").stderr
assert pddbed("exec", "gw0", "true").stderr == ""
done = pddbed("down")
assert done.returncode == 0, done.stderr
assert 'lab "mine" (' in done.stdout and "two-dc-tiny.yaml) is down" in done.stdout, done.stdout
assert alive() == []
"""
    )


def test_a_bare_down_wants_the_name_of_a_lab_of_another_user_or_checkout_or_of_unknown_origin() -> None:
    check(
        BARE
        + r"""
import json, pty
up("theirs", SUDO_UID="1234")
record = find_record("theirs")
origin = json.loads(record.origin_file.read_text())

def refused(words):
    done = pddbed("down")
    assert done.returncode == 1
    assert all(word in done.stderr for word in (*words, 'lab "theirs"', "pddbed down theirs")), done.stderr
    assert "Traceback" not in done.stderr
    assert alive() == ["theirs"]

refused(["user 1234", "two-dc-tiny.yaml"])
assert "user 1234" in pddbed("exec", "gw0", "true").stderr
assert "user 1234" in pddbed("wan", "set", "wan0", "--delay", "3ms").stderr
record.origin_file.write_text(json.dumps(origin | {"uid": 0, "checkout": "/somewhere/else"}))
refused(["another checkout (/somewhere/else)"])
for text in ("", "[1]", "{}", '{"file": 1, "checkout": 2, "uid": "x"}'):
    record.origin_file.write_text(text)
    refused(["unknown user"])
record.origin_file.unlink()
refused(["unknown user"])

def at_terminal(answer):
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", MAIN, "down"])
    said = b""
    while b"end it?" not in said:
        said += os.read(terminal, 1000)
    os.write(terminal, answer)
    try:
        while data := os.read(terminal, 1000):
            said += data
    except OSError:
        pass
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.decode()

status, said = at_terminal(b"n\n")
assert (status, alive()) == (1, ["theirs"]) and "stays up" in said, said
status, said = at_terminal(b"y\n")
assert (status, alive()) == (0, []) and "is down" in said, said
up("theirs", SUDO_UID="1234")
assert pddbed("down", "theirs").returncode == 0
assert alive() == []
"""
    )


def test_the_person_below_sudo_is_who_raised_a_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_UID", "4321")
    assert own_origin(None) == Origin(None, own_origin(None).checkout, 4321)
    for odd in ("", "-1", "x", "9" * 30, "٣"):
        monkeypatch.setenv("SUDO_UID", odd)
        assert own_origin(None).uid == 0
