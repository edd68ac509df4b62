"""When requests are sent: as a trace says, at random with a mean rate, or as soon as may be. Pure.

`vllm bench serve`'s convention: gaps are gamma distributed with shape `burstiness` (1: a Poisson process; below,
burstier; above, more even), then stretched so that the last request leaves after exactly num / rate seconds. Given how
many arrive in a time, a Poisson process' arrivals are distributed just so.
"""

import random
from collections.abc import Sequence
from itertools import accumulate

from experiments.traces.trace import Request


def of_trace(requests: Sequence[Request], speedup: float = 1.0) -> list[int]:
    """Nanoseconds after the first request, `speedup` times as fast as in the trace."""
    begin_ns = min((request.time_ns for request in requests), default=0)
    return [round((request.time_ns - begin_ns) / speedup) for request in requests]


def at_rate(count: int, per_s: float, burstiness: float, seed: int) -> list[int]:
    """Nanoseconds after the beginning of each of `count` requests, the same for a seed everywhere."""
    source = random.Random(f"arrivals {seed}")
    times = list(accumulate(source.gammavariate(burstiness, 1 / burstiness) for _ in range(count)))
    whole = times[-1] if times and times[-1] > 0 else 1.0
    return [round(time / whole * count / per_s * 1e9) for time in times]
