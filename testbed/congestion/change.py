"""Changes of a link: from a section of the file to a `Change`, and from that to the impairments of a link. Pure.

Shared by timelines and `pddbed wan set`. Owns what "the rest is kept" means: the queue keeps its size in bytes when
the rate or the delay changes, and a link that gets its first rate gets the file format's default queue.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from testbed.congestion.timeline import Change
from testbed.impairment import CoDel, Impairment, Jitter, bdp_bytes
from testbed.links.base import DIRECTIONS, Direction
from testbed.topology import schema
from testbed.topology.directions import default_queue_bytes, loss_of
from testbed.topology.fields import NO_LIMIT

_NAMES = {"duplicate": "duplication", "corrupt": "corruption", "reorder": "reordering"}


def change_of(section: schema.Direction, removed: Iterable[str] = ()) -> Change:
    """The values that a section of the file names; `removed` are keys whose value is taken away. Raises ValueError."""
    removed = set(removed)
    values: dict[str, Any] = {}
    for key in schema.Direction.model_fields:
        value = None if key in removed else getattr(section, key)
        if value is None and key not in removed:
            continue
        match key:
            case "rate":
                values["rate_bps"] = None if value == NO_LIMIT else value
            case "delay":
                values["delay_ns"] = value or 0
            case "jitter":
                values["jitter"] = Jitter(value.std, value.distribution) if value and value.std else None
            case "loss":
                values["loss"] = loss_of(value)
            case "queue":
                values |= _queue(value)
            case _:
                values[_NAMES[key]] = value or 0.0
    return Change(tuple(values.items()))


def _queue(queue: schema.Queue | None) -> dict[str, Any]:
    if queue is None:
        return {"queue_bytes": None, "codel": None}
    values: dict[str, Any] = {}
    if queue.bytes is not None:
        values["queue_bytes"] = queue.bytes
    elif queue.bdp is not None:
        values["queue_bdp"] = queue.bdp
    if "codel" in queue.model_fields_set:
        values["codel"] = CoDel() if queue.codel else None
    return values


def apply_change(
    current: Mapping[Direction, Impairment], directions: Iterable[Direction], change: Change, mtu: int
) -> dict[Direction, Impairment]:
    """The impairments of both directions after a change of some. Raises ValueError where values contradict."""
    chosen = tuple(directions)
    named = dict(change.values)
    rtt_ns = sum(
        named.get("delay_ns", current[way].delay_ns) if way in chosen else current[way].delay_ns for way in DIRECTIONS
    )
    return {way: _changed(current[way], named, rtt_ns, mtu) if way in chosen else current[way] for way in DIRECTIONS}


def _changed(current: Impairment, named: Mapping[str, Any], rtt_ns: int, mtu: int) -> Impairment:
    fields = {name: value for name, value in named.items() if name != "queue_bdp"}
    rate_bps = fields.get("rate_bps", current.rate_bps)
    if rate_bps is None:
        if named.get("queue_bytes") is not None or "queue_bdp" in named or named.get("codel") is not None:
            raise ValueError("queue: a link without a rate has no queue; name a rate too")
        fields["queue_bytes"] = fields["codel"] = None
    elif "queue_bdp" in named:
        fields["queue_bytes"] = int(bdp_bytes(rate_bps, rtt_ns) * named["queue_bdp"])
    elif fields.get("queue_bytes", current.queue_bytes) is None:
        fields["queue_bytes"] = default_queue_bytes(rate_bps, rtt_ns, mtu)
    return replace(current, **fields)
