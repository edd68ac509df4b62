"""A lab for an experiment: raised, verified, watched, captured from, and gone when the experiment is, however it ends.

Owns nothing of the lab itself: `testbed` builds it, links and captures are its own commands.
"""

import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from experiments.framework.base import ExperimentError
from experiments.framework.links import LinkWatch, SettingsWatch
from experiments.framework.process import Process
from testbed.capture.counters import CounterReader
from testbed.lab.control import ask_lab
from testbed.lab.environment import host_environment
from testbed.lab.messages import R, Request, VerificationResult, Verify
from testbed.lab.record import LabError, Record, find_record
from testbed.machine.programs import environment, program
from testbed.supervisor import start
from testbed.supervisor.preflight import check
from testbed.topology import TopologyErrors, load_plan

RING = "128MiB"  # rides out seconds in which a busy machine lets nobody write
QUIET_S = 0.2  # at the beginning of a capture
SETTLE_S = 10.0  # for the last frames of what came before
PATIENCE_S = 300.0  # for what a slow machine does slowly; everything here ends by itself long before


class ExperimentLab:
    """A context manager around one lab. `directory` gets logs and the workers' records."""

    def __init__(
        self,
        topology: Path,
        directory: Path,
        *,
        with_workers: bool,
        driver: str = "auto",
        on_step: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.directory = directory
        self.record: Record
        self.state: dict[str, Any] = {}
        self._topology = topology
        self._with_workers = with_workers
        self._driver = driver
        self._on_step = on_step
        self._secret = secrets.token_hex(32)
        self._processes: list[Process] = []

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            plan = load_plan(self._topology)
            self.plan = load_plan(self._topology, f"{plan.name}-{os.getpid()}")
        except TopologyErrors as errors:
            raise ExperimentError(str(errors)) from None
        readiness = check(self.plan, self._driver, with_workers=self._with_workers)
        if readiness.problems:
            raise ExperimentError("\n".join(["this machine cannot raise the lab:", *readiness.problems]))
        serves = self._with_workers and any(host.role == "gateway" for host in self.plan.hosts)
        options = start.UpOptions(
            driver=readiness.driver,
            with_workers=self._with_workers,
            verify=True,
            api=("127.0.0.1", 0) if serves else None,
            tethered=True,
        )
        try:
            self.state = start.up(readiness.plan, options, self._note_step)
            self.record = find_record(self.plan.name)
        except LabError as error:
            raise ExperimentError(str(error)) from None
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.close()
        with suppress(LabError):
            start.down(self.record)

    def _note_step(self, event: dict[str, Any]) -> None:
        if event["event"] == "step":
            self._on_step(event["text"])

    def ask(self, request: Request[R], timeout_s: float = PATIENCE_S) -> R:
        """One request to the lab. Raises ExperimentError."""
        try:
            return ask_lab(self.record, request, timeout_s)
        except LabError as error:
            raise ExperimentError(str(error)) from None

    def verify(self, anew: bool = False) -> VerificationResult:
        """Every link measured now, and why what happened so far is not to be trusted, if it is not; `anew`: what
        happened so far is forgotten first."""
        return self.ask(Verify(quick=True, anew=anew))

    def start_program(self, host: str, module: str) -> Process:
        """`python -m module` in a host, told what the host's worker would be told."""
        plan = next(one for one in self.plan.hosts if one.name == host)
        told = host_environment(self.plan, plan, self._secret, str(self.record.results))
        variables = {**environment(), "PDDBED_INSIDE": json.dumps({**told, "PDDBED_RECORDS": str(self.directory)})}
        command = [*program("experiments.framework.process"), str(self.record.directory), host, *program(module)]
        process = Process(host, command, variables, self.directory / f"{host}.log")
        self._processes.append(process)
        return process

    def settings(self) -> SettingsWatch:
        """Watch of the links' settings from now on. Raises ExperimentError."""
        try:
            return SettingsWatch(self.record)
        except LabError as error:
            raise ExperimentError(str(error)) from None

    @contextmanager
    def watching(self, out: Path, part: str) -> Iterator[LinkWatch]:
        """Meanwhile, a row per link and second is appended to `out`."""
        watch = LinkWatch(self.record, out, part)
        watch.start()
        try:
            yield watch
        finally:
            watch.stop()

    @contextmanager
    def capturing(self, link: str, out: Path, *, headers_only: bool = True) -> Iterator[None]:
        """Meanwhile, the link's packets are recorded. Raises ExperimentError when that failed.

        Begins with counters that were read while nothing crossed: readings amid traffic, on a busy machine those of two
        workers far apart, cannot be told from bytes that were not counted.
        """
        options = ["--headers-only"] if headers_only else []
        options += ["--ring", RING, "--allow-drops"]  # bytes that were missed are found by their sequence numbers
        command = [*program("testbed"), "capture", link, "--lab", self.plan.name, "-f", "-w", str(out), *options]
        child = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True)
        assert child.stderr is not None
        try:
            said = child.stderr.readline()
            if "capturing" not in said:
                raise ExperimentError(f"capturing {link} failed: {said.strip() or child.stderr.read().strip()}")
            self._settle()
            yield
            child.send_signal(signal.SIGINT)
            _, rest = child.communicate(timeout=PATIENCE_S)
            if child.returncode:
                raise ExperimentError(f"capturing {link} failed: {rest.strip()}")
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
            child.stderr.close()

    def _settle(self) -> None:
        """Read the workers' counters until nothing is on its way, clear of the capture's first packets."""
        clear_s = max((wan.rtt_ns for wan in self.plan.wans), default=0) / 1e9 + QUIET_S
        settling = CounterReader(self.record, SETTLE_S, before_s=clear_s)
        while not settling.step():
            time.sleep(QUIET_S / 4)
