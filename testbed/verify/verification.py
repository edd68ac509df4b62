"""Verifying the links of a running lab, and whether what it measured can be trusted.

Owns the floor (delay without impairment, taken once when the lab comes up) and the conversation with the measuring
process (`testbed.verify`). What is measured between is in `targets`, why it is not to be trusted in `faithfulness`.
"""

import json
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from testbed.lab.messages import VerificationResult
from testbed.lab.network import Network
from testbed.lab.troubles import Troubles
from testbed.lab.wan import WanControl
from testbed.links.userspace import UserspaceLink
from testbed.machine.programs import environment, program
from testbed.model.plan import LabPlan
from testbed.verify.drops import receive_buffer_errors
from testbed.verify.faithfulness import Faithfulness
from testbed.verify.judge import Verdict
from testbed.verify.targets import Targets


class VerificationError(Exception):
    """The measuring process failed; the message carries what it said."""


class Verification:
    """Measures the links of one lab."""

    def __init__(self, plan: LabPlan, network: Network, wan: WanControl, records: Path, troubles: Troubles) -> None:
        self._plan = plan
        self._network = network
        self._wan = wan
        self._floor: dict[str, dict[str, float | None]] = {}
        self._path_floor: dict[str, float | None] = {}
        self.last: VerificationResult | None = None
        self._targets = Targets(plan, network, wan)
        self.faithfulness = Faithfulness(network, records, troubles)
        self._measuring = threading.Lock()

    def measure_floor(self) -> None:
        """Measure the bare path: call while no link has an impairment, and before there is traffic."""
        result = self._run("floor", quick=True)
        self._floor, self._path_floor = result["floors"], result["path_floors"]

    def run(self, quick: bool) -> VerificationResult:
        """Measure every link as it is asked to be now: `links`, `paths`, `fabrics`, `ok`, `faithful`, `reasons`."""
        with self._measuring:
            changes = {wan.name: self._wan.changes(wan.name) for wan in self._plan.wans}
            began = time.time()
            result = {"time": began, **self._run("verify", quick)}
        changed = [name for name, before in changes.items() if self._wan.changes(name) != before]
        for link in result["links"]:
            for way, figures in link["directions"].items():
                if link["name"] in changed:
                    for figure in figures:
                        figure.update(judged=False, ok=True, verdict="changed meanwhile")
                self._add_evidence(figures, *link["times"][way])
                figures += list(self._lateness_rows(link["name"], way))
            link["ok"] = link["ok"] or link["name"] in changed
        reasons = [
            f'wan "{name}" was changed while it was measured; verify again when nothing changes it' for name in changed
        ]
        reasons += self.faithfulness.reasons()
        for path in result["paths"]:
            self._add_evidence(path["figures"], result["time"], time.time())
        result["ok"] = all(one["ok"] for one in (*result["links"], *([] if changed else result["paths"])))
        result["quick"] = quick
        result["not_measured"] = [] if changed else not_measured(result["links"])
        result["faithful"] = not reasons
        result["reasons"] = reasons
        self.last = cast(VerificationResult, result)
        return self.last

    def _add_evidence(self, figures: list[dict[str, Any]], begin: float, end: float) -> None:
        """Add what this machine did meanwhile, beside what failed: a busy one may be the cause."""
        for figure in figures:
            if not figure["ok"]:
                told = self.faithfulness.evidence(begin, end)
                figure["note"] = f"{figure['note']}; {told}" if figure["note"] else told

    def _lateness_rows(self, name: str, way: str) -> Iterator[dict[str, Any]]:
        """Lateness of the emulator in the lab's life, and while `verify` loaded it: reported, never judged here."""
        link = self._network.links[name]
        if not isinstance(link, UserspaceLink):
            return
        figures, health = link.lateness()[way], link.health()  # type: ignore[index]
        for figure, late, busy in (
            ("lateness", figures, health["busy_max"]),
            ("lateness (verify)", figures["measuring"], health["busy_max_measuring"]),
        ):
            note = f"p99 of {late['count']}, latest {late['max_ns'] / 1e6:.1f} ms; emulator up to {busy:.0%} busy"
            if figure == "lateness (verify)":
                note += "; while verify loaded the link"
            yield Verdict(figure, "ns", None, late["p99_ns"], None, None, note).row()

    def _run(self, what: str, quick: bool) -> dict[str, Any]:
        for link in self._network.links.values():
            link.counters()  # a broken link says so, and how it broke
        targets = self._targets.links(self._floor)
        measured = {tuple(end["pid"] for end in target["ends"]) for target in targets}
        paths = list(self._targets.paths(measured, self._path_floor))
        request = {
            "what": what,
            "quick": quick,
            "links": targets,
            "paths": paths,
            "fabrics": [] if quick else self._targets.fabrics(),
        }
        ends = {end["pid"] for target in targets for end in target["ends"]} | {path["target_pid"] for path in paths}
        without_room = sum(map(receive_buffer_errors, ends))
        result = self._measure(request)
        self.faithfulness.note_lost_probes(sum(map(receive_buffer_errors, ends)) - without_room)
        for link_result, target in zip(result.get("links", []), targets, strict=False):
            link_result["between"] = target["between"]
        return result

    def _measure(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run the measuring process to its end. Raises VerificationError."""
        with subprocess.Popen(
            program("testbed.verify"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            message: dict[str, Any] = {}
            loading: dict[str, dict[str, int]] = {}
            try:
                with suppress(BrokenPipeError):
                    process.stdin.write(json.dumps(request) + "\n")
                    process.stdin.flush()
                    for line in process.stdout:
                        message = json.loads(line)
                        if "load" in message:
                            loading = self._load(message["load"], loading)
                            process.stdin.write("\n")
                            process.stdin.flush()
            finally:
                if loading:
                    self._load(False, loading)
            said = process.stderr.read().strip().splitlines()[-1:]
        if process.returncode != 0:
            raise VerificationError(f"measuring the links failed: {(said or [f'status {process.returncode}'])[0]}")
        return message

    def _load(self, on: bool, before: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
        """The measuring process begins or ceases to load the links: what that does to them is counted apart.

        Returns the packets that each direction's queue had dropped when it began; {} at the end.
        """
        now: dict[str, dict[str, int]] = {}
        for name, link in self._network.links.items():
            link.measure(on)
            now[name] = {way: counters["dropped_queue"] for way, counters in link.counters().items()}
        if on:
            return now
        for name, dropped in before.items():
            self._wan.dropped_by_verify(name, {way: now[name][way] - count for way, count in dropped.items()})
        return {}


def not_measured(links: list[dict[str, Any]]) -> list[str]:
    """Figures that were asked and not judged, `wan0 forward: queue`; a figure in two forms needs one."""
    found = []
    for link in links:
        for way, figures in link["directions"].items():
            judged = {_subject(figure) for figure in figures if figure["judged"]}
            open_ = dict.fromkeys(_subject(figure) for figure in figures if figure["asked"])
            missing = [subject for subject in open_ if subject not in judged]
            if missing:
                found.append(f"{link['name']} {way}: {', '.join(missing)}")
    return found


def _subject(figure: Mapping[str, Any]) -> str:
    """`rate (UDP)` and `rate (TCP)` are the same."""
    return str(figure["figure"]).partition(" (")[0]
