"""Changing WAN links while a lab runs: `wan show`, `wan set` and `wan reset`, as the supervisor answers them.

Owns what each direction is asked to do now, beside what the file asked. A change names some values and keeps the
rest; it is checked as a whole before any direction changes.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from testbed.impairment import Impairment, Jitter, bdp_bytes
from testbed.links.base import DIRECTIONS, Direction, WanLink
from testbed.topology import schema
from testbed.topology.directions import loss_of
from testbed.topology.plan import LabPlan, WanPlan

# What a change may name, as the topology file spells it; "none" takes a value away.
SETTABLE = ("rate", "delay", "jitter", "loss", "duplicate", "corrupt", "reorder", "queue")


class ChangeError(Exception):
    """A change cannot be made; nothing was changed."""


class WanControl:
    """The links of a lab and what they are asked to do. Methods may be called from any thread."""

    def __init__(self, plan: LabPlan, links: Mapping[str, WanLink]) -> None:
        self._plans = {wan.name: wan for wan in plan.wans}
        self._links = links
        self._lock = threading.Lock()
        self._asked: dict[str, dict[Direction, Impairment]] = {
            wan.name: {"forward": wan.forward, "backward": wan.backward} for wan in plan.wans
        }

    def show(self) -> list[dict[str, Any]]:
        """Per link: the file's values, what is asked now, what is applied, and the counters."""
        return [self._show(name) for name in self._plans]

    def _show(self, name: str) -> dict[str, Any]:
        plan, link = self._plans[name], self._links[name]
        return {
            "name": name,
            "between": [plan.a, plan.b],
            "driver": link.driver,
            "mtu": plan.mtu,
            "file": {direction: getattr(plan, direction).to_dict() for direction in DIRECTIONS},
            "asked": {direction: self._asked[name][direction].to_dict() for direction in DIRECTIONS},
            "applied": dict(link.applied()),
            "counters": dict(link.counters()),
        }

    def asked(self, name: str, direction: Direction) -> Impairment:
        """What the direction is asked to do now."""
        return self._asked[name][direction]

    def set(self, name: str, direction: Direction | None, values: Mapping[str, Any]) -> dict[str, Any]:
        """Change the named values, in one direction or both, and keep the rest. Raises ChangeError, LinkError."""
        plan = self._plan(name)
        with self._lock:
            chosen = DIRECTIONS if direction is None else (direction,)
            current = self._asked[name]
            wanted = {way: changed(current[way], values, _rtt_ns(current), plan.mtu) for way in chosen}
            self._apply(name, wanted)
        return self._show(name)

    def reset(self, name: str) -> dict[str, Any]:
        """Back to what the file says."""
        plan = self._plan(name)
        with self._lock:
            self._apply(name, {"forward": plan.forward, "backward": plan.backward})
        return self._show(name)

    def take_away(self) -> None:
        """Every impairment of every link, until `reset_all`: for measuring the bare path."""
        with self._lock:
            for name in self._plans:
                self._apply(name, dict.fromkeys(DIRECTIONS, Impairment()))

    def reset_all(self) -> None:
        for name in self._plans:
            self.reset(name)

    def apply(self, name: str, direction: Direction, impairment: Impairment) -> None:
        """Apply a whole value, as a timeline does."""
        with self._lock:
            self._apply(name, {direction: impairment})

    def _apply(self, name: str, wanted: Mapping[Direction, Impairment]) -> None:
        for direction, impairment in wanted.items():
            refused = self._links[name].refuses(impairment, self._plans[name].mtu)
            if refused is not None:
                raise ChangeError(f'wan "{name}" ({direction}): {refused}')
        for direction, impairment in wanted.items():
            if impairment != self._asked[name][direction]:
                self._links[name].apply(direction, impairment)
                self._asked[name][direction] = impairment

    def _plan(self, name: str) -> WanPlan:
        if name not in self._plans:
            raise ChangeError(f'no WAN link "{name}" in this lab; there are: {", ".join(self._plans)}')
        return self._plans[name]


def changed(current: Impairment, values: Mapping[str, Any], rtt_ns: int, mtu: int) -> Impairment:
    """`current` with the named values changed; values are spelled as in a topology file. Raises ChangeError.

    The queue keeps its size in bytes when the rate or the delay changes; a link that gets its first rate and no
    queue gets the file format's default.
    """
    from testbed.topology.directions import default_queue_bytes

    unknown = set(values) - set(SETTABLE)
    if unknown:
        raise ChangeError(f"cannot change {', '.join(sorted(unknown))}; one can change: {', '.join(SETTABLE)}")
    removed = {key for key, value in values.items() if value == "none"}
    read = _read({key: value for key, value in values.items() if key not in removed})
    fields: dict[str, Any] = {}
    for key in values:
        value = None if key in removed else getattr(read, key)
        match key:
            case "rate":
                fields["rate_bps"] = value
            case "delay":
                fields["delay_ns"] = value or 0
            case "jitter":
                fields["jitter"] = Jitter(value.std, value.distribution) if value and value.std else None
            case "loss":
                fields["loss"] = loss_of(value)
            case "duplicate" | "corrupt" | "reorder":
                name = {"duplicate": "duplication", "corrupt": "corruption", "reorder": "reordering"}[key]
                fields[name] = value or 0.0
    rate_bps = fields.get("rate_bps", current.rate_bps)
    if rate_bps is None:
        fields["queue_bytes"] = fields["codel"] = None
        if read.queue is not None:
            raise ChangeError("queue: a link without a rate has no queue; name a rate too")
    elif read.queue is not None:
        fields["queue_bytes"] = read.queue.bytes or int(bdp_bytes(rate_bps, rtt_ns) * (read.queue.bdp or 1))
    elif current.queue_bytes is None or "queue" in removed:
        fields["queue_bytes"] = default_queue_bytes(rate_bps, rtt_ns, mtu)
    try:
        return replace(current, **fields)
    except ValueError as error:
        raise ChangeError(str(error)) from None


def _read(values: Mapping[str, Any]) -> schema.Direction:
    try:
        return schema.Direction.model_validate(dict(values))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise ChangeError("; ".join(problem.replace("Value error, ", "") for problem in problems)) from None


def _rtt_ns(asked: Mapping[Direction, Impairment]) -> int:
    return sum(asked[direction].delay_ns for direction in DIRECTIONS)
