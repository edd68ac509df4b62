"""Changing WAN links while a lab runs: `wan show`, `wan set` and `wan reset`, as the supervisor answers them.

Owns what each direction is asked to do now, beside what the file asked. A change names some values and keeps the
rest (testbed.topology.timeline.link_values); it is checked as a whole before any direction changes.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from testbed.lab.messages import Changes, LinkChange, LinkState
from testbed.links.base import LinkCounters, LinkError, WanLink
from testbed.model.direction import DIRECTIONS, Direction
from testbed.model.drivers import refusal
from testbed.model.impairment import Impairment
from testbed.model.plan import LabPlan, WanPlan
from testbed.model.timeline import Change
from testbed.topology import schema
from testbed.topology.timeline.link_values import apply_change, change_of

# What a change may name, as the topology file spells it; "none" takes a value away.
SETTABLE = ("rate", "delay", "jitter", "loss", "duplicate", "corrupt", "reorder", "queue")

CHANGES_KEPT = 1000


class ChangeError(Exception):
    """A change cannot be made; nothing was changed."""


class WanControl:
    """The links of a lab and what they are asked to do. Methods may be called from any thread."""

    def __init__(
        self,
        plan: LabPlan,
        links: Mapping[str, WanLink],
        on_rates: Callable[[Mapping[str, int | None]], None] = lambda _: None,
        on_change: Callable[[str, Mapping[Direction, Impairment]], None] = lambda _, __: None,
    ) -> None:
        """`on_change` is told what a link is asked from now on, whoever changes it; calls come one at a time.

        `on_rates` is told the lower rate of every link's directions after a change by hand; timelines, which may
        change a rate a hundred times a second, do not call it.
        """
        self._plans = {wan.name: wan for wan in plan.wans}
        self._links = links
        self._on_rates = on_rates
        self._on_change = on_change
        self._lock = threading.Lock()
        self._asked: dict[str, dict[Direction, Impairment]] = {
            wan.name: {"forward": wan.forward, "backward": wan.backward} for wan in plan.wans
        }
        self._changes = dict.fromkeys(self._asked, 0)
        self._dropped_by_verify: dict[str, dict[Direction, int]] = {
            name: dict.fromkeys(DIRECTIONS, 0) for name in self._asked
        }
        self._history = {by: deque[LinkChange](maxlen=CHANGES_KEPT) for by in ("hand", "timeline")}
        self._changed_by = dict.fromkeys(self._history, 0)

    def show(self) -> list[LinkState]:
        """Per link: the file's values, what is asked now, what is applied, and the counters.

        `problem` says why a link is broken, whose `applied` and `counters` are empty then; None where it works.
        """
        return [self._show(name) for name in self._plans]

    def _show(self, name: str) -> LinkState:
        plan, link = self._plans[name], self._links[name]
        applied: dict[Direction, dict[str, Any]] = {}
        counters: dict[Direction, LinkCounters] = {}
        punctuality: Mapping[str, Any] | None = None
        problem: str | None = None
        try:
            applied, counters = dict(link.applied()), dict(link.counters())
            punctuality = link.punctuality()
            for direction, dropped in self._dropped_by_verify[name].items():
                counters[direction]["dropped_by_verify"] = dropped
        except LinkError as error:  # one broken link must not hide the rest of the lab
            problem = str(error)
        return {
            "name": name,
            "between": [plan.a, plan.b],
            "driver": link.driver,
            "mtu": plan.mtu,
            "file": {direction: getattr(plan, direction).to_dict() for direction in DIRECTIONS},
            "asked": {direction: self._asked[name][direction].to_dict() for direction in DIRECTIONS},
            "applied": applied,
            "counters": counters,
            "punctuality": punctuality,
            "problem": problem,
        }

    def asked(self, name: str, direction: Direction) -> Impairment:
        """Values that are asked of the direction now."""
        return self._asked[name][direction]

    def changes(self, name: str) -> int:
        """Number of changes of the link so far."""
        return self._changes[name]

    def dropped_by_verify(self, name: str, dropped: Mapping[str, int]) -> None:
        """Packets that the queues dropped while `pddbed verify` filled them; `dropped_queue` counts them too."""
        for direction in DIRECTIONS:
            self._dropped_by_verify[name][direction] += dropped[direction]

    def set(self, name: str, direction: Direction | None, values: Mapping[str, Any]) -> LinkState:
        """Change the named values, in one direction or both, and keep the rest. Raises ChangeError, LinkError."""
        self.change(name, DIRECTIONS if direction is None else (direction,), read_change(values), "hand")
        self.tell_rates()
        return self._show(name)

    def change(self, name: str, directions: Iterable[Direction], change: Change, by: str = "timeline") -> None:
        """As `set`, of a change that was read already: what timelines do. Raises ChangeError, LinkError."""
        plan = self._plan(name)
        with self._lock:
            try:
                wanted = apply_change(self._asked[name], directions, change, plan.mtu)
            except ValueError as error:
                raise ChangeError(str(error)) from None
            self._apply(name, wanted, by)

    def history(self, since: int = 0) -> Changes:
        """Number of changes so far by "hand" and by a "timeline", and those behind the first `since`, the
        last 1,000 of each: at what time (Unix seconds), of which link and direction, and what is asked from then on.
        """
        with self._lock:
            later = [change for kept in self._history.values() for change in kept if change["number"] > since]
            return Changes(dict(self._changed_by), sorted(later, key=lambda change: change["number"]))

    def reset(self, name: str) -> LinkState:
        """Back to what the file says."""
        self._restore(name)
        self.tell_rates()
        return self._show(name)

    def take_away(self) -> None:
        """Every impairment of every link, until `reset_all`: for measuring the bare path."""
        with self._lock:
            for name in self._plans:
                self._apply(name, dict.fromkeys(DIRECTIONS, Impairment()))

    def reset_all(self) -> None:
        """As `reset`, of every link; the hosts are told of the rates once."""
        for name in self._plans:
            self._restore(name)
        self.tell_rates()

    def _restore(self, name: str) -> None:
        plan = self._plan(name)
        with self._lock:
            self._apply(name, {"forward": plan.forward, "backward": plan.backward})

    def tell_rates(self) -> None:
        """Call `on_rates` with the lower rate of each link's two directions, in bit/s."""
        rates: dict[str, int | None] = {}
        for name, asked in self._asked.items():
            limits = [asked[way].rate_bps for way in DIRECTIONS]
            rates[name] = min((limit for limit in limits if limit is not None), default=None)
        self._on_rates(rates)

    def _apply(self, name: str, wanted: Mapping[Direction, Impairment], by: str = "hand") -> None:
        for direction, impairment in wanted.items():
            refused = refusal(self._links[name].driver, impairment, self._plans[name].mtu)
            if refused is not None:
                raise ChangeError(f'wan "{name}" ({direction}): {refused}')
        for direction, impairment in wanted.items():
            if impairment != self._asked[name][direction]:
                self._changes[name] += 1
                self._links[name].apply(direction, impairment)
                self._asked[name][direction] = impairment
                self._changed_by[by] += 1
                change: LinkChange = {
                    "number": sum(self._changed_by.values()),
                    "time": time.time(),
                    "link": name,
                    "direction": direction,
                    "by": by,
                    "asked": impairment.to_dict(),
                }
                self._history[by].append(change)
                self._on_change(name, self._asked[name])

    def _plan(self, name: str) -> WanPlan:
        if name not in self._plans:
            raise ChangeError(f'no WAN link "{name}" in this lab; there are: {", ".join(self._plans)}')
        return self._plans[name]


def read_change(values: Mapping[str, Any]) -> Change:
    """A change whose values are spelled as in a topology file; "none" takes one away. Raises ChangeError."""
    unknown = set(values) - set(SETTABLE)
    if unknown:
        raise ChangeError(f"cannot change {', '.join(sorted(unknown))}; one can change: {', '.join(SETTABLE)}")
    removed = {key for key, value in values.items() if value == "none"}
    read = _read({key: value for key, value in values.items() if key not in removed})
    try:
        return change_of(read, removed)
    except ValueError as error:
        raise ChangeError(str(error)) from None


def _read(values: Mapping[str, Any]) -> schema.Direction:
    try:
        return schema.Direction.model_validate(dict(values))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise ChangeError("; ".join(problem.replace("Value error, ", "") for problem in problems)) from None
