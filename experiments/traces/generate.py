"""Generated traces, the same for a seed on every machine: conversations whose prompts miss as a distribution says.

A trace file cannot state a hit rate; it has to have one. So prompts are made of blocks that the cache holds because an
earlier prompt of the session had them, and of new ones: a session's next prompt keeps a prefix of its last one and goes
on with new blocks. A trace's first prompts miss altogether, and are not part of the distribution (`warm_up`).
"""

import random
from dataclasses import dataclass

from experiments.traces.hit_rates import DISTRIBUTIONS, draw
from experiments.traces.trace import Request, Trace


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to make. Every prompt has `prompt_tokens`; arrivals are evenly spaced at `rate_per_s`."""

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
