"""Statistics of a trace: sizes, and the hit rates that a prefix cache would have. Pure.

The cache is the live workers' own policy (`workers.cache.policy`): unbounded, or bounded in tokens with LRU eviction.
A prompt's last token is always computed, so a repeated prompt hits all but one token. A last block in part that has an
id counts like any other: the workers adopt the tokens of a block that agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.framework.figures import percentile
from experiments.traces.trace import Request, Trace
from workers.cache.policy import PrefixPolicy

HIGH = 0.95  # the publication's threshold between the two pipelines


@dataclass(frozen=True, slots=True)
class Hit:
    """One prompt against the cache of all before it."""

    request: Request
    cached_tokens: int

    @property
    def rate(self) -> float:
        return self.cached_tokens / self.request.input_tokens

    @property
    def delta_tokens(self) -> int:
        """Tokens that have to be computed, and their KV sent."""
        return self.request.input_tokens - self.cached_tokens


def hits(trace: Trace, cache_tokens: int | None = None) -> list[Hit]:
    """Each request in order. `cache_tokens` None: a cache that forgets nothing."""
    policy = PrefixPolicy()
    room = None if cache_tokens is None else max(0, cache_tokens // trace.block_tokens)
    found = []
    for request in trace.requests:
        cached = policy.match(request.blocks)
        found.append(Hit(request, min(cached * trace.block_tokens, request.input_tokens - 1)))
        if request.blocks:
            policy.insert(request.blocks)
        if room is not None and policy.size > room:
            policy.evict(policy.size - room)
    return found


@dataclass(frozen=True, slots=True)
class Stats:
    """A trace in figures. Rates are shares from 0 to 1; `weighted_hit` weighs each request by its prompt's tokens.

    `without_answer`: requests whose answer has no token. `notes`: what was changed when the file was read.
    """

    requests: int
    sessions: int
    seconds: float
    block_tokens: int
    input_tokens: dict[str, float]
    output_tokens: dict[str, float]
    delta_tokens: dict[str, float]
    mean_hit: float
    median_hit: float
    weighted_hit: float
    share_above_95: float
    without_answer: int
    notes: tuple[str, ...]
    sha256: str


def stats(trace: Trace, cache_tokens: int | None = None) -> Stats:
    found = hits(trace, cache_tokens)
    rates = [hit.rate for hit in found]
    prompt = [hit.request.input_tokens for hit in found]
    return Stats(
        requests=len(found),
        sessions=len({request.session for request in trace.requests if request.session is not None}),
        seconds=(trace.requests[-1].time_ns - trace.requests[0].time_ns) / 1e9,
        block_tokens=trace.block_tokens,
        input_tokens=_spread(prompt),
        output_tokens=_spread([hit.request.output_tokens for hit in found]),
        delta_tokens=_spread([hit.delta_tokens for hit in found]),
        mean_hit=sum(rates) / len(rates),
        median_hit=percentile(rates, 0.5),
        weighted_hit=sum(hit.cached_tokens for hit in found) / sum(prompt),
        share_above_95=sum(rate > HIGH for rate in rates) / len(rates),
        without_answer=sum(request.output_tokens == 0 for request in trace.requests),
        notes=trace.notes,
        sha256=trace.sha256,
    )


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    percentiles = {f"p{q}": percentile(ordered, q / 100) for q in (50, 90, 99)}
    return {"mean": sum(ordered) / len(ordered), **percentiles, "max": ordered[-1]}
