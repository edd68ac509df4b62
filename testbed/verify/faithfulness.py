"""Reasons not to trust what a lab measured: emulators that were late, packets dropped unasked, stolen CPU time.

What was unfaithful once stays so until `forget` (`pddbed wan reset`). The reasons of paced workers are read by `pace`.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from testbed.lab.network import Network
from testbed.lab.troubles import Troubles
from testbed.links.base import LinkError
from testbed.links.emulator.messages import DirectionLateness
from testbed.links.userspace import UserspaceLink
from testbed.model.direction import Direction
from testbed.verify.drops import DropWatch
from testbed.verify.machine_watch import MachineWatch
from testbed.verify.pace import pace_reasons, read_pace

BUSIEST_EMULATOR = 0.9
MOST_STOLEN = 0.05  # share of CPU time that the hypervisor gave to somebody else
LATEST_WHILE_MEASURING_NS = 50_000_000  # the load of `verify` itself makes an emulator late, but not by this


class Faithfulness:
    """Faithfulness of one lab, since it came up or since `forget`."""

    def __init__(self, network: Network, records: Path, troubles: Troubles) -> None:
        self._network = network
        self._records = records
        self._troubles = troubles
        self._machine = MachineWatch()
        self._begin()

    def _begin(self) -> None:
        self._cpu_before = psutil.cpu_times()
        self._drops = DropWatch(self._network.pids())
        self._lost_probes = 0
        self._stolen: str | None = None  # once told, it stays

    def forget(self, link: str | None = None) -> None:
        """Forget what was unfaithful so far: of one link, or of the whole lab."""
        for name, one in self._network.links.items():
            if link in (None, name):
                with suppress(LinkError):
                    one.forget()
        if link is None:
            self._troubles.forget()
            self._begin()

    def evidence(self, begin: float, end: float) -> str:
        """Account of what this machine did from `begin` to `end`, in seconds of the epoch."""
        return self._machine.evidence(begin, end)

    def note_lost_probes(self, count: int) -> None:
        """Probes that found no room in their receiver's buffer: the measuring itself was too slow."""
        self._lost_probes += count

    def reasons(self) -> list[str]:
        """Reasons why figures measured in this lab since it came up, or since `forget`, are not to be trusted."""
        reasons = []
        for name, link in self._network.links.items():
            try:
                for direction, counters in link.counters().items():
                    if lost := counters["dropped_unasked"]:
                        reasons.append(f'wan "{name}" {direction}: {lost} packets dropped unasked')
                for direction, values in link.applied().items():
                    if str(values.get("jitter", "")).startswith("interrupted"):  # see links.wander
                        reasons.append(f'wan "{name}" {direction}: its jitter was {values["jitter"]}')
                if isinstance(link, UserspaceLink):
                    reasons += self._emulator_reasons(name, link.lateness(), link.health())
            except LinkError as error:
                reasons.append(str(error))
        reasons += self._drops.reasons()
        if self._lost_probes:
            reasons.append(f"{self._lost_probes} probes found no room in their receiver's buffer")
        return reasons + self._cpu_reasons() + pace_reasons(read_pace(self._records)) + self._troubles.reasons()

    def _emulator_reasons(
        self, name: str, lateness: Mapping[Direction, DirectionLateness], health: Mapping[str, Any]
    ) -> Iterator[str]:
        for direction, figures in lateness.items():
            where = f'wan "{name}" {direction}'
            if (told := figures["unfaithful"]) is not None:
                worst = told["worst"]
                more = f", and {told['windows'] - 1} times more" if told["windows"] > 1 else ""
                yield (
                    f"{where}: the emulator was late at {clock(worst['to'])}{more}: {worst['late']} of "
                    f"{worst['packets']} packets by more than 1 ms, up to {worst['worst_ns'] / 1e6:.1f} ms "
                    f"(limit {worst['limit']:.0%} of them, or one by 50 ms); "
                    f"{self._machine.evidence(worst['from'], worst['to'])}"
                )
            told = figures["measuring"]["unfaithful"]
            if told is not None and told["worst"]["worst_ns"] > LATEST_WHILE_MEASURING_NS:
                worst = told["worst"]
                yield (
                    f"{where}: packets waited for the emulator for up to {worst['worst_ns'] / 1e6:.0f} ms at "
                    f"{clock(worst['to'])} while verify loaded it; {self._machine.evidence(worst['from'], worst['to'])}"
                )
        if health["busy_max"] > BUSIEST_EMULATOR:
            yield f'wan "{name}": the emulator was {health["busy_max"]:.0%} busy (limit {BUSIEST_EMULATOR:.0%})'

    def _cpu_reasons(self) -> list[str]:
        now = psutil.cpu_times()
        total = sum(now) - sum(self._cpu_before)
        stolen = getattr(now, "steal", 0.0) - getattr(self._cpu_before, "steal", 0.0)
        if total > 0 and stolen / total > MOST_STOLEN:
            self._stolen = (
                f"the hypervisor took {stolen / total:.0%} of this machine's CPU time by {clock(time.time())}"
            )
        return [] if self._stolen is None else [self._stolen]


def clock(wall_s: float) -> str:
    """A time in seconds of the epoch as people read it."""
    return time.strftime("%H:%M:%S", time.localtime(wall_s))
