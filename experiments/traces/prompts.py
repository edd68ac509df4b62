"""Prompts for a trace's requests: token ids such that equal block ids mean equal tokens. Pure.

Blocks of the trace become blocks of `block_tokens` token ids drawn by the block's id; a scale model asks for fewer than
the trace's own.
"""

import random
from collections.abc import Sequence

from experiments.traces.trace import Request, Trace


class PromptMaker:
    """Makes token ids from block ids. `vocabulary`: the ids to draw from, the model's special ones left out."""

    def __init__(self, trace: Trace, vocabulary: Sequence[int], block_tokens: int | None = None, seed: int = 0) -> None:
        self.block_tokens = block_tokens or trace.block_tokens
        if trace.block_tokens % self.block_tokens:
            raise ValueError(f"blocks of {trace.block_tokens} tokens cannot become blocks of {self.block_tokens}")
        self.scale = trace.block_tokens // self.block_tokens
        self._vocabulary = list(vocabulary)
        self._seed = seed
        self._drawn: dict[int, list[int]] = {}

    def length(self, request: Request) -> int:
        """Tokens of the prompt; at least one."""
        return max(1, request.input_tokens // self.scale)

    def prompt(self, request: Request, copy: int = 0) -> list[int]:
        """The request's token ids. `copy`: which of several requests of one moment and turn it is, from 0."""
        tokens: list[int] = []
        length = self.length(request)
        for block in request.blocks:
            if len(tokens) >= length:
                break
            tokens += self.block(block)
        if len(tokens) < length:  # a last block in part that the trace gives no id: nobody else's
            tokens += self._tail(request, length - len(tokens), copy)
        return tokens[:length]

    def _tail(self, request: Request, count: int, copy: int) -> list[int]:
        name = f"{self._seed} {request.time_ns} {request.session} {request.turn}"
        source = random.Random(f"{name} {copy}" if copy else name)
        return source.choices(self._vocabulary, k=count)

    def block(self, block: int) -> list[int]:
        """The tokens of one block, drawn by its id: others are equal only by chance, where blocks are very short."""
        if block not in self._drawn:
            source = random.Random(f"{self._seed} {block}")
            self._drawn[block] = source.choices(self._vocabulary, k=self.block_tokens)
        return self._drawn[block]
