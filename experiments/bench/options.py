"""Options of `pddbed bench`, and what follows from them: the requests of a load, and when each is due. Reads traces.

Arrivals at a rate are `vllm bench serve`'s: gaps are gamma distributed with shape `burstiness` (1: a Poisson process;
below, burstier; above, more even), then stretched so that the last request leaves after exactly num / rate seconds.
Given how many arrive in a time, a Poisson process' arrivals are distributed just so.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from experiments.bench.load import Load, LoadError, altered, check_fits, divided, kept, left_out, with_output
from experiments.bench.synthetic import Synthetic
from experiments.traces import read_trace
from experiments.traces.trace import Request, Trace


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


@dataclass(frozen=True)
class Asked:
    """The options. None: not given. `source`: a trace's file, None for a synthetic load."""

    source: Path | None = None
    model: str | None = None
    form: str | None = None
    block_tokens: int | None = None
    speedup: float | None = None
    max_input: int | None = None
    only_fitting: bool = False
    divide: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    distribution: str | None = None
    sessions: int | None = None
    prefix_share: float | None = None
    rate: float | None = None
    burstiness: float | None = None
    concurrency: int | None = None
    in_turn: bool = False
    num: int | None = None
    seed: int = 1
    ignore_eos: bool = True
    token_ids: range = range(32, 127)
    warm_up: int = 1
    limits: Mapping[str, float] | None = None
    percentiles: tuple[float, ...] = (99.0,)

    def read(self) -> Trace:
        """The trace as it is in its file, or the synthetic load. Raises TraceError."""
        if self.source is None:
            return self._recipe.trace()
        return read_trace(self.source, self.form or "auto", self.block_tokens)

    def load(self, trace: Trace, context: int | None) -> Load:
        """Load for a server whose model has so much context (None: it does not say). Raises LoadError."""
        if self.only_fitting and context is None:
            raise LoadError(
                "the server does not say its model's context, so that nobody knows what fits; use --max-input"
            )
        if self.source is None:
            load = Load(trace, self._recipe.warm_up)
        else:
            smaller = trace if self.divide is None else divided(trace, self.divide)
            source = with_output(smaller, self.output_len)
            limits = self.max_input, self.num, context if self.only_fitting else None
            taken = kept(source, *limits)
            before = dict(zip(map(id, source.requests), trace.requests, strict=True))
            originals = [before[id(request)] for request in taken.requests]
            changed = left_out(source, taken.requests, *limits) | altered(originals, self.divide or 1, self.output_len)
            load = Load(taken, 0, source, changed)
        if context is not None:
            check_fits(load.trace, context, load.source, self.divide or 1)
        return load

    @property
    def _recipe(self) -> Synthetic:
        return Synthetic(
            num=self.num or 100,
            input_tokens=self.input_len or 512,
            output_tokens=self.output_len or 64,
            prefix_share=self.prefix_share or 0.0,
            distribution=self.distribution,
            sessions=self.sessions or 16,
            block_tokens=self.block_tokens or 16,
            seed=self.seed,
        )

    def due_ns(self, trace: Trace, first: int) -> list[int] | list[None]:
        """Times at which each request behind the first ones is due."""
        requests = trace.requests[first:]
        if self.rate is None and self.source is not None:
            return of_trace(requests, self.speedup or 1.0)
        if self.rate is None or math.isinf(self.rate):
            return [None] * len(requests)
        return at_rate(len(requests), self.rate, self.burstiness or 1.0, self.seed)

    @property
    def request_rate(self) -> float | str:
        """As the summary has it."""
        if self.rate is not None and not math.isinf(self.rate):
            return self.rate
        return "trace" if self.rate is None and self.source is not None else "inf"

    @property
    def rounding(self) -> list[str]:
        """Differences of a synthetic load from what it is asked for, in sentences."""
        if self.source is not None or self.prefix_share is None:
            return []
        got = self._recipe.shared_share
        if abs(got - self.prefix_share) < 0.0005:
            return []
        return [
            f"--prefix-share {self.prefix_share:.1%} is {got:.1%} here: prompts share whole blocks (--block-tokens)."
        ]

    def words(self, trace: Trace) -> str:
        """For a report's title."""
        pace = f"{self.request_rate:g}/s" if isinstance(self.request_rate, float) else ""
        cap = f"{self.concurrency} at once" if self.concurrency else ""
        return ", ".join(filter(None, (trace.origin, pace, cap)))
