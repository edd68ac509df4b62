"""Loads that are made up: prompts of one length that share nothing, a prefix, or as much as a distribution says. Pure.

The same block ids and distributions as `pddbed trace make`.
"""

from dataclasses import dataclass, replace

from experiments.traces.generate import Recipe, generate
from experiments.traces.trace import Request, Trace, blocks_of


@dataclass(frozen=True, slots=True)
class Synthetic:
    """`prefix_share`: of each prompt, equal in all, in whole blocks. `distribution`: of hit rates, over `sessions`;
    prompts are then whole blocks, and each session has a first prompt on top, which misses.
    """

    num: int
    input_tokens: int
    output_tokens: int
    prefix_share: float = 0.0
    distribution: str | None = None
    sessions: int = 16
    block_tokens: int = 16
    seed: int = 1

    @property
    def warm_up(self) -> int:
        """Number of the trace's first requests that are not part of what was asked for."""
        if self.distribution is None:
            return 0 if self._shared_blocks == 0 else 1
        return self.sessions

    @property
    def shared_share(self) -> float:
        """Share of each prompt that is equal in all."""
        return self._shared_blocks * self.block_tokens / self.input_tokens

    @property
    def _shared_blocks(self) -> int:
        return int(self.prefix_share * self.input_tokens) // self.block_tokens

    def trace(self) -> Trace:
        """`warm_up` requests, then `num`."""
        if self.distribution is not None:
            made = generate(
                Recipe(
                    distribution=self.distribution,
                    requests=self.num,
                    sessions=self.sessions,
                    prompt_tokens=self.input_tokens,
                    block_tokens=self.block_tokens,
                    seed=self.seed,
                )
            )
            return replace(
                made, requests=tuple(replace(one, output_tokens=self.output_tokens) for one in made.requests)
            )
        shared = self._shared_blocks
        own = blocks_of(self.input_tokens, self.block_tokens) - shared
        requests = []
        for index in range(self.warm_up + self.num):
            first = 1 + shared + index * own
            blocks = (*range(1, shared + 1), *range(first, first + own))
            requests.append(Request(index, self.input_tokens, self.output_tokens, blocks))
        origin = f"synthetic, seed {self.seed}"
        return Trace(tuple(requests), self.block_tokens, "synthetic", origin)
