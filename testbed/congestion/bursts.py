"""When a source of cross traffic is on: bursts and pauses of exponentially distributed lengths. Pure and seeded.

An interrupted Poisson process (Kuczura 1973): the same seed gives the same bursts on every machine. It is on at first
with the share of time that it is on in the long run, so that the mean rate holds from the beginning.
"""

import random
from collections.abc import Iterator


def burst_seed(seed: int, event: int, occurrence: int, target: int, flow: int) -> str:
    """What a flow's bursts follow from: the lab's seed and the flow's place in the timeline."""
    return f"pddbed congestion {seed} {event} {occurrence} {target} {flow}"


def bursts(seed: str, duration_ns: int, on_ns: int | None, off_ns: int | None) -> Iterator[tuple[int, int]]:
    """(start, end) of every burst within a duration, ascending and apart; the whole of it without mean lengths."""
    if on_ns is None or off_ns is None:
        yield 0, duration_ns
        return
    chance = random.Random(seed)
    on = chance.random() < on_ns / (on_ns + off_ns)
    at = 0
    while at < duration_ns:
        length = max(1, round(chance.expovariate(1 / (on_ns if on else off_ns))))
        if on:
            yield at, min(at + length, duration_ns)
        at += length
        on = not on
