"""Generated traces: prompts that miss as a distribution says, or like coding agents'; a seed gives the same everywhere.

A trace file cannot state a hit rate; it has to have one. So prompts are made of blocks that the cache holds because an
earlier prompt of the session had them, and of new ones: a session's next prompt keeps a prefix of its last one and goes
on with new blocks. A trace's first prompts miss altogether, and are not part of the distribution (`warm_up`).

Real sessions of coding agents hit nearly all or nothing once a cache forgets a session that pauses: three in four
prompts repeat all but a percent or two, and nearly one in five has to be computed whole. The pauses are in the trace:
such a prompt has new ids, so that no cache's size or age decides, and a simulator and a lab see the same hits. Prompt
lengths, answers and misses are stratified as in `hit_rates`; arrivals are Poisson.
"""

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experiments.traces.hit_rates import DISTRIBUTIONS, STRATUM, MissRates, draw
from experiments.traces.trace import Request, Trace


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe of a trace. Every prompt has `prompt_tokens`; arrivals are evenly spaced at `rate_per_s`."""

    distribution: str = "skewed"
    requests: int = 512
    sessions: int = 16
    prompt_tokens: int = 4096
    output_tokens: int = 64
    block_tokens: int = 16
    rate_per_s: float = 6.9
    seed: int = 1

    @property
    def warm_up(self) -> int:
        """The first prompts, one a session, which miss."""
        return self.sessions


def generate(recipe: Recipe) -> Trace:
    """`warm_up` first prompts, then `requests` that hit as the distribution says."""
    misses = draw(DISTRIBUTIONS[recipe.distribution], recipe.requests, recipe.seed)
    source = random.Random(f"outputs {recipe.seed}")
    full = recipe.prompt_tokens // recipe.block_tokens
    next_id = 1
    last: list[tuple[int, ...]] = []
    turns = [0] * recipe.sessions
    requests = []
    for index in range(recipe.warm_up + recipe.requests):
        if index < recipe.warm_up:
            session, kept = index, 0
        else:
            session = source.randrange(recipe.sessions)
            kept = full - round(misses[index - recipe.warm_up] * full)
        before = last[session][:kept] if session < len(last) else ()
        blocks = (*before, *range(next_id, next_id + full - kept))
        next_id += full - kept
        if session < len(last):
            last[session] = blocks
        else:
            last.append(blocks)
        requests.append(
            Request(
                time_ns=round(index / recipe.rate_per_s * 1e9),
                input_tokens=full * recipe.block_tokens,
                output_tokens=max(1, round(source.gauss(recipe.output_tokens, recipe.output_tokens / 4))),
                blocks=blocks,
                session=session,
                turn=turns[session],
            )
        )
        turns[session] += 1
    origin = f"generated: {recipe.distribution}, seed {recipe.seed}"
    return Trace(tuple(requests), recipe.block_tokens, "generated", origin)


EXPIRING = MissRates(
    "expiring",
    (
        (0.0, 0.002),
        (0.1, 0.003),
        (0.25, 0.005),
        (0.5, 0.012),
        (0.7, 0.037),
        (0.745, 0.05),
        (0.78, 0.113),
        (0.8, 0.21),
        (0.835, 1.0),
        (1.0, 1.0),
    ),
)
"""Real sessions of a coding agent in a cache that keeps what was used in the last minute: 74.5 % of requests above 95 %
hit, more than one in six misses altogether, mean hit 0.8."""

# (share of requests, tokens), of the same sessions: prompts that miss altogether, and answers
PROMPTS = ((0.0, 8e3), (0.1, 29e3), (0.25, 53e3), (0.5, 86e3), (0.75, 118e3), (0.9, 140e3), (0.99, 340e3), (1.0, 540e3))
ANSWERS = (
    (0.0, 4),
    (0.1, 101),
    (0.25, 137),
    (0.5, 210),
    (0.75, 400),
    (0.9, 800),
    (0.95, 1289),
    (0.99, 2836),
    (1.0, 4000),
)
EDITED = 0.1  # a prompt that misses more than this is the last one changed at an early place; others are longer by it
Knots = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class SessionRecipe:
    """`context_tokens` caps every prompt. Two prompts of a session are at least half of `sessions` requests apart."""

    requests: int = 3000
    sessions: int = 128
    context_tokens: int = 128_000
    block_tokens: int = 256
    rate_per_s: float = 2.0
    seed: int = 1

    @property
    def warm_up(self) -> int:
        """The first prompts, one a session, which miss altogether; they come on top of `requests`."""
        return self.sessions


def generate_sessions(recipe: SessionRecipe) -> Trace:
    """`warm_up` first prompts, all at time 0, then `requests` from there on."""
    size, count = recipe.block_tokens, recipe.requests
    source = random.Random(f"sessions {recipe.seed}")
    misses = [1.0] * recipe.warm_up + draw(EXPIRING, count, recipe.seed)
    fresh = stratified(PROMPTS, random.Random(f"prompts {recipe.seed}"))
    answers = stratified(ANSWERS, random.Random(f"answers {recipe.seed}"))
    most = max(1, recipe.context_tokens // size)
    last: list[tuple[int, ...]] = [()] * recipe.sessions
    turns = [0] * recipe.sessions
    resting = list(range(recipe.sessions))
    next_id, now_s = 1, 0.0
    requests = []
    for index, (miss, answer) in enumerate(zip(misses, answers, strict=False)):
        if index < recipe.warm_up:
            session = index
        else:
            now_s += source.expovariate(recipe.rate_per_s)
            session = resting.pop(source.randrange(max(1, recipe.sessions // 2)))
            resting.append(session)
        before = last[session]
        if miss >= 1.0 or not before:
            blocks, kept = min(most, max(1, round(next(fresh) / size))), 0
        else:
            grown = round(len(before) / (1 - miss)) if miss < EDITED else len(before)
            blocks = min(most, max(grown, 2))
            kept = min(len(before), blocks - max(1, round(miss * blocks)))
        path = (*before[:kept], *range(next_id, next_id + blocks - kept))
        next_id += blocks - kept
        last[session] = path
        output = max(1, round(answer))
        requests.append(Request(round(now_s * 1e9), blocks * size, output, path, session, turns[session]))
        turns[session] += 1
    return Trace(tuple(requests), size, "generated", f"generated: coding agents, seed {recipe.seed}")


def stratified(knots: Knots, source: random.Random) -> Iterator[float]:
    """Values of a quantile function, without end: of each 16 in a row one from each sixteenth, shuffled."""
    while True:
        shares = [(index + source.random()) / STRATUM for index in range(STRATUM)]
        source.shuffle(shares)
        yield from (_at(knots, share) for share in shares)


def _at(knots: Knots, share: float) -> float:
    right = min(len(knots) - 1, bisect_right(knots, share, key=lambda knot: knot[0]))
    (before, low), (after, high) = knots[right - 1], knots[right]
    return low + (high - low) * (share - before) / (after - before)
