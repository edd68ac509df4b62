"""What is tried in the VM, one part after the other, from the boot of the Vagrantfile to its end.

A part that fails is a sentence, and the rest goes on: the end is reached in any case, and the status says.
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
from testbed.vagrant.errors import VagrantError
from testbed.vagrant.session import Session
from testbed.vagrant.times import Times
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


class Trial:
    """The parts, each timed, and what has failed so far."""

    def __init__(self, session: Session, times: Times) -> None:
        self.session = session
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


def run(session: Session, times: Times, results: Path) -> int:
    """Everything; the exit status."""
    trial = Trial(session, times)
    try:
        boot(session, times)
        trial.part("doctor says netem", lambda: doctor(session))
        if trial.part("a lab comes up on netem", lambda: raise_lab(session)):
            trial.part("a request from the host is relayed", lambda: relayed_request(session))
            trial.part("verify measures what the file says", lambda: verify(session, results))
            trial.part("the lab goes down", lambda: lower_lab(session))
        trial.part("conformance of the netem driver", lambda: conformance(session))
        trial.part("a lab on Open vSwitch", lambda: open_vswitch(session))
        trial.part("experiment run skew --quick", lambda: experiment(session))
        trial.part("results fetched", lambda: fetch(session, results))
    finally:
        trial.part("destroy", lambda: destroy(session))
    if trial.failed:
        say(f"failed: {'; '.join(trial.failed)}")
    return 1 if trial.failed else 0


def boot(session: Session, times: Times) -> None:
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

    session.up(heard)
    marks.append(time.monotonic())
    took = (after - before for before, after in itertools.pairwise(marks))
    times.parts += zip(("up", "provision"), took, strict=False)


def doctor(session: Session) -> str:
    found = pddbed_json(session, "doctor", "--json")
    if found["wan_driver"] != "netem":
        raise VagrantError(f"the guest's driver is {found['wan_driver']}: {found['wan_driver_reason']}")
    return str(found["wan_driver_reason"])


def raise_lab(session: Session) -> None:
    command(session, f"sudo pddbed up {LAB} --api 0.0.0.0:8000")


def relayed_request(session: Session) -> str:
    """Through the forwarded port, from this machine; the tokens are those of one process alone in the VM."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(f"http://127.0.0.1:{session.api_port}/v1/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            answer = json.load(response)["pdd"]
    except urllib.error.HTTPError as error:
        raise VagrantError(f"the gateway answered {error.code}: {error.read().decode(errors='replace')}") from error
    control = json.loads(session.fetch(f"{PYTHON} python -c {shlex.quote(CONTROL)}", PATIENCE_S))
    if answer["token_ids"] != control:
        raise VagrantError(f"the relayed answer differs from the control: {answer['token_ids']} is not {control}")
    made_by = sorted(set(answer["instances"]))
    if made_by != ["md0", "rld0"]:
        raise VagrantError(f"the answer was made by {', '.join(made_by)}; relay and main decode should both have part")
    return f"{len(control)} tokens equal to the control's, {answer['instances'].count('rld0')} of them by the relay"


def verify(session: Session, results: Path) -> str:
    """Every judged figure within its tolerance. An emulated CPU on a busy machine stands still now and then, which no
    link makes up for: there each figure has up to three measurements, and one of them must be within.
    """
    results.mkdir(exist_ok=True)
    most = 1 if session.kvm else 3
    outstanding: set[tuple[str, str, str]] = set()
    for number in range(1, most + 1):
        with undisturbed():
            found = pddbed_json(session, "verify", "--json", statuses=(0, 1))
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


def lower_lab(session: Session) -> None:
    command(session, 'sudo pddbed down --all && test -z "$(ls /run/pddbed)"')


def conformance(session: Session) -> str:
    with undisturbed():
        done = session.fetch(
            f"mkdir -p {OUT} && {python(session)} {PYTEST} --junitxml={OUT}/conformance.xml tests/conformance "
            f"-k {shlex.quote(CONFORMANCE)}",
            PATIENCE_S,
        )
    return done.decode().strip().splitlines()[-1]


def python(session: Session) -> str:
    """The guest's environment for tests; they allow an emulated CPU's timers to be late where this variable is set."""
    return PYTHON if session.kvm else f"{PYTHON} PDDBED_VM=1"


def open_vswitch(session: Session) -> str:
    said = (
        session.fetch(f"{python(session)} {PYTEST} tests/testbed/lab/test_openvswitch.py", PATIENCE_S).decode().strip()
    )
    if "1 passed, 1 skipped" not in said:  # the refusal is for machines without it
        raise VagrantError(f"the lab on Open vSwitch was not tried:\n  {said}")
    return said.splitlines()[-1]


def experiment(session: Session) -> str:
    """It runs to its end and reports. On an emulated CPU its verdict is shown and not judged: transfers start late."""
    done = session.ssh(f"cd /vagrant && sudo pddbed experiment run skew --quick --out {OUT}/skew", PATIENCE_S)
    if done.returncode not in ((0,) if session.kvm else (0, 1)):
        raise VagrantError(f"the experiment failed with status {done.returncode}; its output is above")
    summary = json.loads(session.fetch(f"sudo cat {OUT}/skew/summary.json", PATIENCE_S))
    if done.returncode == 0:
        return "every figure met"
    return f"ran and reported (status 1): {'; '.join(summary['reasons']) or 'a figure was missed'}"


def fetch(session: Session, results: Path) -> str:
    archive = session.fetch(f"sudo tar -C {OUT} -c .", PATIENCE_S)
    results.mkdir(exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(results, filter="data")
    return f"{len(list(results.rglob('*')))} files"


def destroy(session: Session) -> None:
    session.destroy()
    left = session.volumes()
    if left:
        raise VagrantError(f"vagrant destroy left {', '.join(left)}")


def command(session: Session, words: str) -> None:
    """A command in the VM, its output shown. Raises VagrantError with its status."""
    done = session.ssh(words, PATIENCE_S)
    if done.returncode != 0:
        raise VagrantError(f"in the VM, {words!r} failed with status {done.returncode}; its output is above")


def pddbed_json(session: Session, *words: str, statuses: tuple[int, ...] = (0,)) -> dict[str, Any]:
    said = session.fetch(f"sudo pddbed {shlex.join(words)}", PATIENCE_S, statuses)
    found: dict[str, Any] = json.loads(said)
    return found


def say(sentence: str) -> None:
    print(f"[{time.strftime('%T')}] {sentence}", flush=True)
