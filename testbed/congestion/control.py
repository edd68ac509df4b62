"""The congestion of one running lab: at most one timeline plays at a time, and everything applied is written down.

Owns which timeline that is, and `congestion.jsonl` in the lab's records: one JSON object a line, in order. Every line
has `monotonic_ns` (CLOCK_MONOTONIC, which all namespaces of a machine share) and `what`; docs/congestion.md lists the
rest. Methods may be called from any thread.
"""

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic_ns
from typing import Any

from testbed.congestion.apply import Applier, adapted
from testbed.congestion.player import Player, PlayError
from testbed.lab.messages import TimelineState
from testbed.lab.network import Network
from testbed.lab.record import Record
from testbed.lab.troubles import Troubles
from testbed.lab.wan import WanControl
from testbed.model.plan import LabPlan
from testbed.model.timeline import Timeline
from testbed.model.units import format_duration

LOG_FILE = "congestion.jsonl"  # in the lab's records
MOST_BYTES = 1 << 30  # a replay of an hour at 100 changes a second is a tenth of that


class ChangeLog:
    """The file. A line is in it when `write` returns. `trouble`: told what failed, and how.

    A full disk ends no timeline: lines that find no room are told as a trouble of the lab, and so is everything that
    failed.
    """

    def __init__(self, path: Path, trouble: Callable[[str, object], None]) -> None:
        self._path = path
        self._trouble = trouble
        self._fd: int | None = None
        self._closed = False
        self._lock = threading.Lock()

    def write(self, what: str, **fields: Any) -> None:
        line = json.dumps({"monotonic_ns": monotonic_ns(), "what": what, **fields}, separators=(",", ":"))
        if what == "error":
            self._trouble("a change of a timeline failed", fields.get("error", ""))
        if what == "end" and fields.get("state") == "failed":
            self._trouble("a timeline ended early", (fields.get("errors") or ["it does not say why"])[-1])
        with self._lock:
            if not self._closed:
                try:
                    self._append(line.encode() + b"\n")
                except OSError as error:
                    self._trouble("congestion.jsonl lacks a line", error.strerror or error)

    def _append(self, line: bytes) -> None:
        """One whole line or none of it. Raises OSError."""
        if self._fd is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size > MOST_BYTES:
            raise OSError(f"it has reached its limit of {MOST_BYTES} bytes")
        if os.fstat(self._fd).st_nlink == 0:
            os.close(self._fd)
            self._fd = None
            return self._append(line)
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, size)
            raise
        return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


class Congestion:
    """Plays timelines on a lab."""

    def __init__(self, plan: LabPlan, record: Record, network: Network, wan: WanControl, troubles: Troubles) -> None:
        self._plan = plan
        self._record = record
        self._network = network
        self._wan = wan
        self._troubles = troubles
        self._player: Player | None = None
        self._log: ChangeLog | None = None
        self._lock = threading.Lock()

    def play(self, timeline: Timeline) -> TimelineState:
        """Begin now, with the lab's seed; returns the state. Raises PlayError."""
        with self._lock:
            if self._player is not None and self._player.running:
                raise PlayError(
                    f"{_describe(self._player.state())} is playing; end it first with: pddbed wan play --stop"
                )
            if self._log is None:
                self._log = ChangeLog(self._record.results / LOG_FILE, self._troubles.note)
            drivers = {name: link.driver for name, link in self._network.links.items()}
            seeded = adapted(replace(timeline, seed=self._plan.seed), drivers)
            applier = Applier(self._plan, self._network, self._wan, seeded, self._log.write)
            player = self._player = Player(seeded, applier, self._log.write, self._record.events_socket)
            player.begin()
        return player.state()

    def stop(self) -> TimelineState:
        """End what plays. Raises PlayError when nothing does."""
        player = self._player
        if player is None or not player.running:
            raise PlayError("no timeline is playing")
        player.stop()
        return player.state()

    def state(self) -> TimelineState | None:
        """The state of the timeline that plays, or that played last; None where there was none."""
        return None if self._player is None else self._player.state()


def _describe(state: TimelineState) -> str:
    length = "" if state["length_ns"] is None else f" of {format_duration(state['length_ns'])}"
    return f"{state['source']} ({(state['elapsed_ns'] or 0) / 1e9:.1f} s{length})"
