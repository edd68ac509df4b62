"""The checks in the VM, one after the other, from the boot of the Vagrantfile to its end.

A check that fails is a sentence, and the rest goes on: the end is reached in any case, and the status says.
"""

import io
import itertools
import json
import shlex
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testbed.vagrant import sandbox
from testbed.vagrant.machine import VagrantError
from testbed.vagrant.vagrant import Vagrant
from testbed.verify.words import shown

LAB = "/vagrant/tests/vagrant/lab.yaml"
TOKENS = 200  # the relay has time for some, whatever the load: it makes about 40 a second there
PROMPT = [(17 + 31 * number) % 256 for number in range(24)]
CONTROL = f"""
import json, torch
torch.set_num_threads(1)
from workers.engine import Sampling, generate
from workers.models import ModelSpec, load_model
sampling = Sampling(max_tokens={TOKENS}, ignore_eos=True)
print(json.dumps(generate(load_model(ModelSpec("tiny")), {PROMPT}, sampling)))
"""
PYTHON = "cd /vagrant && sudo env PATH=/opt/pddbed/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"
PYTEST = "python -m pytest -p pytest_timeout -p no:cacheprovider -q --tb=short -o junit_family=xunit1"
OUT = "/vagrant/out"
# The suite's heart, at rates that an emulated CPU carries; all of it runs in the small VM of `make test`.
CONFORMANCE = (
    "ping_takes or two_directions or lone_packet or [1000000-1500] or independent_loss or bursty_loss "
    "or jitter_keeps or in_flight or exactly_what_was_asked"
)
QEMU = "qemu-system-x86"  # as /proc/PID/comm has it
BUSY, MEASURING = -5, -19  # its nice value: in general, and while the guest measures
PATIENCE_S = 900  # of one part; an emulated CPU on a busy machine may need most of it


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, the VM has the CPUs almost to itself: a rate lost while it stands still is lost."""
    sandbox.hurry(QEMU, MEASURING)
    try:
        yield
    finally:
        sandbox.hurry(QEMU, BUSY)


class Times:
    """Parts in the order in which they ended, each in seconds."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, float]] = []

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Time the block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.parts.append((part, time.monotonic() - began))

    def print(self) -> None:
        for part, seconds in self.parts:
            print(f"  {part:<44} {seconds:7.1f} s")
        print(f"  {'in all':<44} {sum(seconds for _, seconds in self.parts):7.1f} s", flush=True)


class Checks:
    """The parts, each timed, and what has failed so far."""

    def __init__(self, vagrant: Vagrant, times: Times) -> None:
        self.vagrant = vagrant
        self.times = times
        self.failed: list[str] = []

    def part(self, name: str, do: Callable[[], str | None]) -> bool:
        """Run one part and report it; whether it passed. `do` returns a remark, or raises VagrantError."""
        began = time.monotonic()
        try:
            with self.times.of(name):
                remark = do()
        except (VagrantError, OSError, ValueError, KeyError) as error:
            self.failed.append(name)
            say(f"FAILED {name} after {time.monotonic() - began:.1f} s: {error}")
            return False
        say(f"passed {name} ({time.monotonic() - began:.1f} s){': ' + remark if remark else ''}")
        return True


def run(vagrant: Vagrant, times: Times, results: Path) -> int:
    """Everything; the exit status."""
    checks = Checks(vagrant, times)
    try:
        boot(vagrant, times)
        checks.part("doctor says netem", lambda: doctor(vagrant))
        if checks.part("a lab comes up on netem", lambda: raise_lab(vagrant)):
            checks.part("a request from the host is relayed", lambda: relayed_request(vagrant))
            checks.part("verify measures what the file says", lambda: verify(vagrant, results))
            checks.part("the lab goes down", lambda: lower_lab(vagrant))
        checks.part("conformance of the netem driver", lambda: conformance(vagrant))
        checks.part("a lab on Open vSwitch", lambda: open_vswitch(vagrant))
        checks.part("experiment run skew --quick", lambda: experiment(vagrant))
        checks.part("results fetched", lambda: fetch(vagrant, results))
    finally:
        checks.part("destroy", lambda: destroy(vagrant))
    if checks.failed:
        say(f"failed: {'; '.join(checks.failed)}")
    return 1 if checks.failed else 0


def boot(vagrant: Vagrant, times: Times) -> None:
    """`vagrant up` on the shipped Vagrantfile, its provisioning timed by itself. Raises VagrantError."""
    marks = [time.monotonic()]

    def heard(line: str) -> None:
        if "Waiting for domain" in line:
            sandbox.hurry(QEMU, BUSY)
        if "Running provisioner" in line:
            marks.append(time.monotonic())
        line = line.rpartition("\x1b[K")[2].removeprefix("==> default: ")
        if not line.startswith((" -- ", "    -> ", "Progress")):
            print(f"    {line}", flush=True)

    vagrant.up(heard)
    marks.append(time.monotonic())
    took = (after - before for before, after in itertools.pairwise(marks))
    times.parts += zip(("up", "provision"), took, strict=False)


def doctor(vagrant: Vagrant) -> str:
    found = pddbed_json(vagrant, "doctor", "--json")
    if found["wan_driver"] != "netem":
        raise VagrantError(f"the guest's driver is {found['wan_driver']}: {found['wan_driver_reason']}")
    return str(found["wan_driver_reason"])


def raise_lab(vagrant: Vagrant) -> None:
    command(vagrant, f"sudo pddbed up {LAB} --api 0.0.0.0:8000")


def relayed_request(vagrant: Vagrant) -> str:
    """Through the forwarded port, from this machine; the tokens are those of one process alone in the VM."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(f"http://127.0.0.1:{vagrant.api_port}/v1/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            answer = json.load(response)["pdd"]
    except urllib.error.HTTPError as error:
        raise VagrantError(f"the gateway answered {error.code}: {error.read().decode(errors='replace')}") from error
    control = json.loads(vagrant.fetch(f"{PYTHON} python -c {shlex.quote(CONTROL)}", PATIENCE_S))
    if answer["token_ids"] != control:
        raise VagrantError(f"the relayed answer differs from the control: {answer['token_ids']} is not {control}")
    made_by = sorted(set(answer["instances"]))
    if made_by != ["md0", "rld0"]:
        raise VagrantError(f"the answer was made by {', '.join(made_by)}; relay and main decode should both have part")
    return f"{len(control)} tokens equal to the control's, {answer['instances'].count('rld0')} of them by the relay"


def verify(vagrant: Vagrant, results: Path) -> str:
    """Every judged figure within its tolerance. An emulated CPU on a busy machine stands still now and then, which no
    link makes up for: there each figure has up to three measurements, and one of them must be within.
    """
    results.mkdir(exist_ok=True)
    most = 1 if vagrant.kvm else 3
    outstanding: set[tuple[str, str, str]] = set()
    for number in range(1, most + 1):
        with undisturbed():
            found = pddbed_json(vagrant, "verify", "--json", statuses=(0, 1))
        (results / f"verify-{number}.json").write_text(json.dumps(found, indent=1))
        judged = {
            (link["name"], direction, figure["figure"]): figure
            for link in found["links"]
            for direction, figures in link["directions"].items()
            for figure in figures
            if figure["judged"]
        }
        for (name, direction, what), figure in judged.items():
            asked, measured = (shown(figure[key], figure["unit"]) for key in ("asked", "measured"))
            verdict = "" if figure["ok"] else "  out of tolerance"
            print(f"    {number}: {name} {direction:<8} {what:<12} asked {asked:<9} measured {measured}{verdict}")
        missed = {key for key, figure in judged.items() if not figure["ok"]}
        outstanding = missed if number == 1 else outstanding & missed
        if not outstanding:
            times = "in the first measurement" if number == 1 else f"in at least one of {number} measurements"
            return f"{len(judged)} figures within their tolerances {times}"
    raise VagrantError(f"never within its tolerance: {', '.join(' '.join(key) for key in sorted(outstanding))}")


def lower_lab(vagrant: Vagrant) -> None:
    command(vagrant, 'sudo pddbed down --all && test -z "$(ls /run/pddbed)"')


def conformance(vagrant: Vagrant) -> str:
    with undisturbed():
        done = vagrant.fetch(
            f"mkdir -p {OUT} && {python(vagrant)} {PYTEST} --junitxml={OUT}/conformance.xml tests/conformance "
            f"-k {shlex.quote(CONFORMANCE)}",
            PATIENCE_S,
        )
    return done.decode().strip().splitlines()[-1]


def python(vagrant: Vagrant) -> str:
    """The guest's environment for tests; they allow an emulated CPU's timers to be late where this variable is set."""
    return PYTHON if vagrant.kvm else f"{PYTHON} PDDBED_VM=1"


def open_vswitch(vagrant: Vagrant) -> str:
    said = (
        vagrant.fetch(f"{python(vagrant)} {PYTEST} tests/testbed/lab/test_openvswitch.py", PATIENCE_S).decode().strip()
    )
    if "1 passed, 1 skipped" not in said:  # the refusal is for machines without it
        raise VagrantError(f"the lab on Open vSwitch was not tried:\n  {said}")
    return said.splitlines()[-1]


def experiment(vagrant: Vagrant) -> str:
    """It runs to its end and reports. On an emulated CPU its verdict is shown and not judged: transfers start late."""
    done = vagrant.ssh(f"cd /vagrant && sudo pddbed experiment run skew --quick --out {OUT}/skew", PATIENCE_S)
    if done.returncode not in ((0,) if vagrant.kvm else (0, 1)):
        raise VagrantError(f"the experiment failed with status {done.returncode}; its output is above")
    summary = json.loads(vagrant.fetch(f"sudo cat {OUT}/skew/summary.json", PATIENCE_S))
    if done.returncode == 0:
        return "every figure met"
    return f"ran and reported (status 1): {'; '.join(summary['reasons']) or 'a figure was missed'}"


def fetch(vagrant: Vagrant, results: Path) -> str:
    archive = vagrant.fetch(f"sudo tar -C {OUT} -c .", PATIENCE_S)
    results.mkdir(exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(results, filter="data")
    return f"{len(list(results.rglob('*')))} files"


def destroy(vagrant: Vagrant) -> None:
    vagrant.destroy()
    left = vagrant.volumes()
    if left:
        raise VagrantError(f"vagrant destroy left {', '.join(left)}")


def command(vagrant: Vagrant, words: str) -> None:
    """A command in the VM, its output shown. Raises VagrantError with its status."""
    done = vagrant.ssh(words, PATIENCE_S)
    if done.returncode != 0:
        raise VagrantError(f"in the VM, {words!r} failed with status {done.returncode}; its output is above")


def pddbed_json(vagrant: Vagrant, *words: str, statuses: tuple[int, ...] = (0,)) -> dict[str, Any]:
    said = vagrant.fetch(f"sudo pddbed {shlex.join(words)}", PATIENCE_S, statuses)
    found: dict[str, Any] = json.loads(said)
    return found


def say(sentence: str) -> None:
    print(f"[{time.strftime('%T')}] {sentence}", flush=True)
