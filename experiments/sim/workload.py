"""Changes of a trace before it is simulated. Pure."""

import random
from dataclasses import replace

from experiments.traces.trace import Trace, in_order


class BadWorkload(ValueError):
    """A trace that cannot be simulated so, in one sentence."""


def left_out(trace: Trace, warm_up: int, context_tokens: int) -> dict[str, int]:
    """Numbers of simulated requests that are not as the trace has them, by what is told of them in `LEFT_OUT`."""
    measured = trace.requests[warm_up:]
    counts = {
        "warm_up": warm_up,
        "cut_prompts": sum(one.input_tokens > context_tokens for one in measured),
        "answers_beyond_context": sum(
            min(one.input_tokens, context_tokens) + one.output_tokens > context_tokens for one in measured
        ),
        "empty_answers": sum(one.output_tokens == 0 for one in measured),
    }
    return {name: count for name, count in counts.items() if count}


LEFT_OUT = {
    "warm_up": "{} requests came before, filled the caches and are in no figure",
    "cut_prompts": "{} of {} prompts are longer than context_tokens and were cut to it",
    "answers_beyond_context": "{} of {} answers go beyond context_tokens with their prompt, and were not cut",
    "empty_answers": "{} of {} requests have an answer of no token, and were given one",
    "beyond_num": "{} requests of the trace are left out behind --num",
}


def first(trace: Trace, count: int) -> Trace:
    return replace(trace, requests=trace.requests[:count])


def at_rate(trace: Trace, per_s: float) -> Trace:
    """The same requests in the same rhythm, at so many a second in the mean; its notes tell. Raises BadWorkload."""
    begin, end = trace.requests[0].time_ns, trace.requests[-1].time_ns
    if end == begin:
        raise BadWorkload(f"all requests of {trace.origin} arrive at once; no rate can be given to them")
    stretch = (len(trace.requests) - 1) / per_s / ((end - begin) / 1e9)
    moved = tuple(replace(one, time_ns=round((one.time_ns - begin) * stretch)) for one in trace.requests)
    note = f"Times are {stretch:.3g} times the trace's, for {per_s:g} requests a second."
    return replace(trace, requests=moved, notes=(*trace.notes, note))


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
    note = f"Each session begins at a time of its own within {seconds:g} s, instead of the trace's."
    return replace(trace, requests=in_order(moved), notes=(*trace.notes, note))
