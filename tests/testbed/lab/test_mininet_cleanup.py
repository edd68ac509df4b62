"""`mn -c`, which anybody may run on the machine, ends no lab. Never run on the machine itself: it deletes files of /tmp
and ends processes by their names, so it runs in PID, mount and network namespaces of its own, the lab in them.
"""

import pytest

from tests.testbed.lab.apart import run_apart

pytestmark = pytest.mark.root

PROGRAM = """
import json, os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "none", "/tmp"], check=True)
os.environ["HOME"] = "/run"
MAIN = "from testbed.cli import main; main(prog_name='pddbed')"

def pddbed(*words):
    done = subprocess.run([sys.executable, "-c", MAIN, *words], capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout

def pids():
    return {name for name in os.listdir("/proc") if name.isdigit()}

file = "/run/lab.yaml"
with open(file, "w") as out:
    out.write('''
datacenters:
  main: {subnet: 10.1.0.0/24, hosts: {a: {}, b: {command: sleep 600}}}
  remote: {subnet: 10.2.0.0/24, hosts: {c: {}}}
wan: [{between: [main, remote], delay: 1ms}]
''')
pddbed("up", file, "--name", "spared", "--no-verify")
before = pids()
subprocess.run(["ip", "link", "add", "junk-eth0", "type", "bridge"], check=True)
done = subprocess.run([sys.executable, "-c", "from mininet.clean import cleanup; cleanup()"], capture_output=True)
assert done.returncode == 0, done.stderr
assert "junk" not in subprocess.run(["ip", "link"], capture_output=True, text=True).stdout  # it did clean up
assert before <= pids()
status = json.loads(pddbed("status", "--json"))
assert [host["state"] for host in status["hosts"]] == ["idle", "running", "idle"], status["hosts"]
pddbed("exec", "a", "ping", "-c", "1", "-W", "5", "c")
pddbed("exec", "c", "ping", "-c", "1", "-W", "5", "b")
pddbed("down")
"""


def test_mininets_clean_up_spares_a_living_lab() -> None:
    done = run_apart(PROGRAM, own_network=True)
    assert done.returncode == 0, done.stderr


LOSSES = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from testbed.lab.record import find_record
MAIN = "from testbed.cli import main; main(prog_name='pddbed')"

def pddbed(*words):
    return subprocess.run([sys.executable, "-c", MAIN, *words], capture_output=True, text=True)

assert pddbed("up", "topologies/two-dc-tiny.yaml", "--name", "torn", "--no-verify", "--no-workers").returncode == 0
record = find_record("torn")
assert record.losses() == []

def processes(word):
    found = [path for path in Path("/proc").glob("[0-9]*/cmdline") if word in path.read_bytes().split(b"\\0")]
    return [int(path.parent.name) for path in found]

def told(words):
    deadline = time.monotonic() + 5
    while not any(words in loss for loss in record.losses()):
        assert time.monotonic() < deadline, record.losses()
        time.sleep(0.05)
    shown = pddbed("ps"), pddbed("status")
    assert all(words in done.stdout for done in shown), shown

os.kill(processes(b"pddbed-node:d0h1")[0], signal.SIGKILL)
told("p0 is gone")
os.kill(processes(b"testbed.links.emulator")[0], signal.SIGKILL)
told("wan wan0 is broken")
for pid in processes(b"torn"):
    if Path(f"/proc/{pid}/comm").read_text() == "pddbed-lab\\n":
        subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", "link", "del", "br1"], check=True)
told("switch of remote is gone")
os.kill(processes(b"pddbed-node:r1")[0], signal.SIGKILL)
told("router.remote is gone")
assert pddbed("down", "torn").returncode == 0
"""


def test_whatever_a_lab_loses_is_told_by_ps_and_status() -> None:
    done = run_apart(LOSSES, own_network=True)
    assert done.returncode == 0, done.stderr
