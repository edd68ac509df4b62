"""The congestion of one running lab: at most one timeline plays at a time. Methods may be called from any thread.

Owns which one that is, and answers `wan play` and `wan show` on the control socket.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from testbed.congestion.apply import Applier, adapted
from testbed.congestion.change_log import ChangeLog
from testbed.congestion.player import Player, PlayError
from testbed.congestion.timeline import Timeline
from testbed.lab.network import Network
from testbed.lab.record import Record
from testbed.lab.troubles import Troubles
from testbed.lab.wan import WanControl
from testbed.topology.plan import LabPlan
from testbed.units import format_duration

LOG_FILE = "congestion.jsonl"  # in the lab's records


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

    def play(self, timeline: Timeline) -> dict[str, Any]:
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
            applier = Applier(self._plan, self._network, self._wan, seeded, self._log)
            player = self._player = Player(seeded, applier, self._log, self._record.events_socket)
            player.begin()
        return player.state()

    def stop(self) -> dict[str, Any]:
        """End what plays. Raises PlayError when nothing does."""
        player = self._player
        if player is None or not player.running:
            raise PlayError("no timeline is playing")
        player.stop()
        return player.state()

    def state(self) -> dict[str, Any] | None:
        """The state of the timeline that plays, or that played last; None where there was none."""
        return None if self._player is None else self._player.state()


def _describe(state: Mapping[str, Any]) -> str:
    length = "" if state["length_ns"] is None else f" of {format_duration(state['length_ns'])}"
    return f"{state['source']} ({(state['elapsed_ns'] or 0) / 1e9:.1f} s{length})"
