"""A timeline as a person reads it, one line an event. Owns the words; decides nothing."""

from collections.abc import Iterator

from testbed.model.impairment import BernoulliLoss
from testbed.model.timeline import CrossTraffic, Event, Outage, Ramp, Replay, Step, Timeline
from testbed.model.units import format_duration, format_percent, format_rate, short_duration, short_percent, short_rate

_NAMES = {
    "rate_bps": "rate",
    "delay_ns": "delay",
    "queue_bytes": "queue",
    "queue_bdp": "queue",
    "duplication": "duplicate",
    "corruption": "corrupt",
    "reordering": "reorder",
}


def describe_timeline(timeline: Timeline) -> list[str]:
    """`at 5s on wan0 both ways: rate 10mbit, delay 100ms`."""
    return [f"{_when(event)} on {_where(event)}: {_what(event)}" for event in timeline.events]


def _when(event: Event) -> str:
    if event.trigger is not None:
        share = "" if event.trigger.fraction is None else f" at {short_percent(event.trigger.fraction)}"
        who = {"any": "", "each": " of each request"}.get(event.trigger.request, f" of {event.trigger.request}")
        when = f"on {event.trigger.event}{share}{who}"
    else:
        when = f"at {format_duration(event.at_ns or 0)}"
    return when if event.times == 1 else f"{when}, {event.times} times every {format_duration(event.every_ns)},"


def _where(event: Event) -> str:
    links: dict[str, list[str]] = {}
    for link, direction in event.targets:
        links.setdefault(link, []).append(direction)
    return " and ".join(f"{link} {ways[0] if len(ways) == 1 else 'both ways'}" for link, ways in links.items())


def _what(event: Event) -> str:
    what = event.what
    if isinstance(what, Step):
        return ", ".join(f"{_NAMES.get(name, name)} {_value(name, value)}" for name, value in what.change.values)
    lasts = format_duration(event.duration_ns)
    if isinstance(what, Ramp):
        return f"within {lasts} {', '.join(_ramp(what))}"
    if isinstance(what, Outage):
        return f"an outage of {lasts}"
    if isinstance(what, CrossTraffic):
        rate = "all it gets" if what.rate_bps is None else format_rate(what.rate_bps)
        flows = f"{what.flows} {what.protocol} flow{'' if what.flows == 1 else 's'}"
        bursts = ""
        if what.on_ns is not None and what.off_ns is not None:
            bursts = f", on and off for {short_duration(what.on_ns)} and {short_duration(what.off_ns)} on average"
        return f"cross traffic for {lasts}: {flows}, {rate}{bursts}"
    return _replay(what, lasts)


def _ramp(ramp: Ramp) -> Iterator[str]:
    for name, start, end in ramp.values:
        if name == "loss":
            yield f"loss from {format_percent(start)} to {format_percent(end)}"
        else:
            yield f"{_NAMES[name]} from {_value(name, round(start))} to {_value(name, round(end))}"


def _replay(replay: Replay, lasts: str) -> str:
    trace = replay.trace
    count = len(trace)
    parts = [f"{count:,} change{'' if count == 1 else 's'} in {short_duration(trace.period_ns)}"]
    if trace.mean_rate_bps is not None:
        parts.append(f"{short_rate(trace.mean_rate_bps)} on average")
    if trace.granularity_ns:
        parts.append(f"in steps of {format_duration(trace.granularity_ns)}")
    return f"trace {trace.name} for {lasts} ({', '.join(parts)})"


def _value(name: str, value: object) -> str:
    match name, value:
        case "rate_bps", None:
            return "without limit"
        case "queue_bytes", None:
            return "by default"
        case _, None:
            return "off"
        case "rate_bps", int():
            return format_rate(value)
        case "delay_ns", int():
            return format_duration(value)
        case "queue_bytes", int():
            return f"{value:,} B"
        case "queue_bdp", _:
            return f"{value} BDP"
        case "loss", BernoulliLoss():
            return format_percent(value.probability)
        case "loss", _:
            return "in bursts"
        case "jitter", _:
            return f"{format_duration(value.std_ns)} {value.distribution}"  # type: ignore[attr-defined]
        case "codel", _:
            return "on"
        case _, float():
            return format_percent(value)
    return str(value)
