"""What is done to a trace before it is simulated. Pure."""

import random
from dataclasses import replace

from experiments.traces.trace import Trace, in_order


class BadWorkload(ValueError):
    """A trace that cannot be simulated so, in one sentence."""


def first(trace: Trace, count: int) -> Trace:
    return replace(trace, requests=trace.requests[:count])


def at_rate(trace: Trace, per_s: float) -> Trace:
    """The same requests in the same rhythm, at so many a second in the mean. Raises BadWorkload."""
    begin, end = trace.requests[0].time_ns, trace.requests[-1].time_ns
    if end == begin:
        raise BadWorkload(f"all requests of {trace.origin} arrive at once; no rate can be given to them")
    stretch = (len(trace.requests) - 1) / per_s / ((end - begin) / 1e9)
    moved = tuple(replace(one, time_ns=round((one.time_ns - begin) * stretch)) for one in trace.requests)
    return replace(trace, requests=moved)


def spread(trace: Trace, seconds: float, seed: int) -> Trace:
    """Each session begins at a time of its own within so many seconds. Raises BadWorkload where there are none."""
    if any(request.session is None for request in trace.requests):
        raise BadWorkload(f"{trace.origin} names no sessions, whose beginnings could be spread")
    begins: dict[int | None, int] = {}
    for request in trace.requests:
        begins.setdefault(request.session, request.time_ns)
    source = random.Random(f"spread {seed}")
    shift_ns = {session: round(source.uniform(0, seconds) * 1e9) - begin for session, begin in begins.items()}
    moved = [replace(one, time_ns=one.time_ns + shift_ns[one.session]) for one in trace.requests]
    return replace(trace, requests=in_order(moved))
