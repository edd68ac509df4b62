"""The suite of lies: on every device of a request's way somebody else delays, drops, doubles, corrupts, reorders or
slows packets, or stops or starves the emulator. Each lie is caught, and the honest link in between is not accused.

An honest figure that fails on a busy machine has to name the evidence.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from testbed.lab.control import ask_lab
from testbed.lab.messages import Faithful, R, Request, Status, Verify, WanReset, WanSet, WanShow
from testbed.lab.record import find_record
from testbed.machine.netns import network_namespace_of
from tests.conftest import run_pddbed
from tests.testbed.verify.second_emulator import SecondEmulator

pytestmark = pytest.mark.root
NAME = "lies"
# Where a packet from gw0 to md0 leaves a device: gw0, its bridge, the far router's inside, the far bridge's port.
DEVICES = ("gw0 eth0", "bridges br0-r", "far router eth0", "bridges br1-h0")
LIES: dict[str, tuple[dict[str, float], str]] = {
    "later": ({"delay_s": 0.005}, "delay"),
    "lost": ({"loss": 0.2}, "loss"),
    "doubled": ({"duplicate": 0.2}, "duplicates"),
    "corrupted": ({"corrupt": 0.2}, "loss"),  # a checksum fails on the way; the full form tells them apart
    "out of order": ({"late": 0.2}, "reordering"),
}


class LiedTo:
    """The lab, and the processes in its namespaces as this machine numbers them."""

    def __init__(self) -> None:
        self.record = find_record(NAME)
        inside = run_pddbed("exec", "-l", NAME, "gw0", "--", "readlink", "/proc/self/ns/pid").stdout.strip()
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _link(path / "ns" / "pid") == inside]
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
        self.emulator_pid = next(pid for pid, command in commands.items() if b"testbed.links.emulator" in command)
        nodes = {address: pid for pid in pids for address in _addresses(pid)}
        self.places = {
            "gw0": nodes["10.1.0.2"],
            "rld0": nodes["10.1.0.4"],
            "md0": nodes["10.2.0.2"],
            "near router": nodes["10.1.0.1"],
            "far router": nodes["10.2.0.1"],
            "bridges": next(pid for pid in pids if "br0-r" in Path(f"/proc/{pid}/net/dev").read_text()),
        }

    def ask(self, request: Request[R]) -> R:
        return ask_lab(self.record, request, 120)

    def verify(self, quick: bool = True) -> dict[str, Any]:
        return cast(dict[str, Any], self.ask(Verify(quick)))

    def set(self, **values: Any) -> None:
        self.ask(WanSet("wan0", None, values))

    def emulator(self, device: str) -> SecondEmulator:
        place, _, ifname = device.rpartition(" ")
        return SecondEmulator(self.places[place], ifname)

    @contextmanager
    def slowed(self, device: str, rate: str = "20mbit") -> Iterator[None]:
        """A tbf on a device."""
        place, _, ifname = device.rpartition(" ")
        with network_namespace_of(self.places[place]):
            shape = ("tbf", "rate", rate, "burst", "10000", "limit", "3000000")
            subprocess.run(("tc", "qdisc", "add", "dev", ifname, "root", *shape), check=True)
            try:
                yield
            finally:
                subprocess.run(("tc", "qdisc", "del", "dev", ifname, "root"), check=True)


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _addresses(pid: int) -> list[str]:
    """Of the interfaces in a process's network namespace."""
    return re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", Path(f"/proc/{pid}/net/fib_trie").read_text())


@pytest.fixture(scope="module")
def lab() -> Iterator[LiedTo]:
    result = run_pddbed("up", "topologies/two-dc-tiny.yaml", "--name", NAME, "--api", "auto", "--no-workers")
    assert result.returncode == 0, result.stderr
    try:
        yield LiedTo()
    finally:
        run_pddbed("down", NAME)


@pytest.fixture(autouse=True)
def honest_again(lab: LiedTo) -> Iterator[None]:
    yield
    lab.ask(WanReset())


def failed(result: dict[str, Any], way: str = "forward") -> dict[str, str]:
    """The figures that failed, and their notes."""
    (link,) = result["links"]
    return {figure["figure"]: figure["note"] for figure in link["directions"][way] if not figure["ok"]}


def assert_honest(result: dict[str, Any]) -> None:
    """Nothing is accused; or the note shows that this machine was busy: time stolen, or spent waiting for a CPU."""
    accused = {f"{way}: {name}": note for way in ("forward", "backward") for name, note in failed(result, way).items()}
    accused |= {reason: reason for reason in result["reasons"]}
    for name, note in accused.items():
        found = re.search(r"the hypervisor took (\d+)%(?:.* waited for a CPU (\d+)%)?", note)
        assert found, f"{name}: {note}"
        assert int(found[1]) > 0 or int(found[2] or 0) >= 10, f"{name}: {note}"


@pytest.mark.parametrize("device", DEVICES)
def test_the_quick_form_finds_each_lie_on_each_device(lab: LiedTo, device: str) -> None:
    with lab.emulator(device) as emulator:
        for lie, (values, figure) in LIES.items():
            for name, value in values.items():
                setattr(emulator, name, value)
            assert figure in failed(lab.verify()), f"{lie} at {device}"
            for name in values:
                setattr(emulator, name, 0.0)
    assert_honest(lab.verify())


@pytest.mark.parametrize("device", [*DEVICES, "near router wan0"])
def test_the_quick_form_finds_a_lower_rate_on_each_device(lab: LiedTo, device: str) -> None:
    with lab.slowed(device):
        assert "rate (UDP)" in failed(lab.verify())


@pytest.mark.parametrize("device", ["gw0 eth0", "far router eth0"])
def test_jitter_hides_no_lie(lab: LiedTo, device: str) -> None:
    lab.set(jitter={"std": "1ms"})
    assert_honest(lab.verify())
    with lab.emulator(device) as emulator:
        emulator.delay_s = 0.005
        assert "delay" in failed(lab.verify())
    with lab.slowed(device):
        assert failed(lab.verify()).keys() & {"rate (UDP)", "delay"}


def test_what_a_few_probes_cannot_tell_is_not_measured(lab: LiedTo) -> None:
    lab.set(delay="1s", jitter={"std": "450ms"})
    result = lab.verify()
    (link,) = result["links"]
    verdicts = {figure["figure"]: figure["verdict"] for figure in link["directions"]["forward"]}
    assert verdicts["delay"] == verdicts["jitter"] == "not measured"
    assert any("delay, jitter" in told for told in result["not_measured"])
    lab.ask(WanReset())
    lab.set(jitter={"std": "0.05ms"})
    with lab.emulator("far router eth0") as emulator:
        emulator.delay_s = 0.03
        assert "delay" in failed(lab.verify())


@pytest.mark.nightly
def test_the_full_form_finds_small_shares_and_tells_them_apart(lab: LiedTo) -> None:
    lab.set(rate="50mbit", delay="5ms", queue={"bytes": "100000B"})  # the second emulator is no fast one
    with lab.emulator("far router eth0") as emulator:
        emulator.loss = emulator.duplicate = emulator.corrupt = 0.005
        found = failed(lab.verify(quick=False))
    assert {"loss", "duplicates", "corruption"} <= found.keys()


def test_a_lie_at_another_hosts_port_shows_on_its_path(lab: LiedTo) -> None:
    with lab.emulator("bridges br0-h2") as emulator:  # towards rld0
        emulator.delay_s = 0.005
        bad = [path["name"] for path in lab.verify()["paths"] if not path["ok"]]
    assert bad == ["md0 > rld0"]


@contextmanager
def traffic(lab: LiedTo, per_second: int, seconds: float) -> Iterator[None]:
    """Pings from gw0 to md0 meanwhile."""
    count = str(int(per_second * seconds))
    with network_namespace_of(lab.places["gw0"]):
        ping = subprocess.Popen(
            ("ping", "-q", "-c", count, "-i", str(1 / per_second), "10.2.0.2"), stdout=subprocess.PIPE
        )
    yield
    ping.communicate(timeout=60)


def accusations(lab: LiedTo) -> list[str]:
    return [reason for reason in lab.ask(Faithful()).reasons if "the emulator was late" in reason]


def test_an_emulator_that_stood_still_for_a_second_stays_accused_until_reset(lab: LiedTo) -> None:
    with traffic(lab, 500, 1.0):
        time.sleep(0.2)
        os.kill(lab.emulator_pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(lab.emulator_pid, signal.SIGCONT)
    result = lab.verify()
    assert not result["faithful"]
    (first, *_) = accusations(lab)
    assert "meanwhile the hypervisor took" in first
    assert first in result["reasons"]
    assert time.strftime("%H:%M") in first or time.strftime("%H:%M", time.localtime(time.time() - 60)) in first
    with traffic(lab, 500, 1.0):
        pass
    assert accusations(lab), "told once, gone later"
    assert any("late" in reason for reason in lab.ask(Status())["unfaithful"])
    assert "NO" in run_pddbed("ps").stdout
    lab.ask(WanReset())
    assert not accusations(lab)


def test_an_emulator_that_stood_still_while_nothing_came_is_not_accused(lab: LiedTo) -> None:
    time.sleep(0.2)
    os.kill(lab.emulator_pid, signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(lab.emulator_pid, signal.SIGCONT)
    time.sleep(0.2)
    assert not accusations(lab)


def test_a_few_packets_that_came_while_an_idle_emulator_stood_still_are_counted(lab: LiedTo) -> None:
    os.kill(lab.emulator_pid, signal.SIGSTOP)
    with traffic(lab, 20, 0.3):
        time.sleep(0.4)
        os.kill(lab.emulator_pid, signal.SIGCONT)
    assert accusations(lab)


def test_an_emulator_that_is_starved_of_cpu_is_accused(lab: LiedTo) -> None:
    hog = "import os\nos.sched_setaffinity(0, {%d})\nwhile True: pass"
    with ExitStack() as stack:
        for cpu in os.sched_getaffinity(0):
            process = stack.enter_context(subprocess.Popen((sys.executable, "-c", hog % cpu)))
            stack.callback(process.kill)
        os.sched_setscheduler(lab.emulator_pid, os.SCHED_IDLE, os.sched_param(0))
        try:
            with traffic(lab, 200, 3.0):
                pass
        finally:
            os.sched_setscheduler(lab.emulator_pid, os.SCHED_FIFO, os.sched_param(20))
    assert accusations(lab)


def test_a_change_while_it_is_measured_is_named(lab: LiedTo) -> None:
    changing = threading.Timer(0.2, lambda: lab.set(delay="60ms"))
    changing.start()
    result = lab.verify()
    changing.join()
    (link,) = result["links"]
    verdicts = {figure["verdict"] for figures in link["directions"].values() for figure in figures} - {"reported"}
    assert verdicts == {"changed meanwhile"}
    assert any("wan0" in reason and "was changed while" in reason for reason in result["reasons"])
    assert not result["faithful"]


@pytest.mark.nightly
def test_verify_keeps_its_own_load_apart(lab: LiedTo) -> None:
    result = lab.verify(quick=False)
    assert_honest(result)
    (link,) = lab.ask(WanShow()).links
    counters = link["counters"]["forward"]
    assert counters["dropped_by_verify"] == counters["dropped_queue"] > 0
    assert "verify's own load made the queues drop" in run_pddbed("wan", "show", "-l", NAME).stdout
    figures = {figure["figure"]: figure for figure in result["links"][0]["directions"]["forward"]}
    assert figures["lateness (verify)"]["measured"] >= figures["lateness"]["measured"]
    # A machine that is too busy to send 1.15 times the rate says that it filled no queue.
    assert all(told.endswith(": queue") for told in result["not_measured"])
