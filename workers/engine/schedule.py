"""Which tokens the next step computes. Pure policy, without clocks, threads or memory."""

from __future__ import annotations

from collections.abc import Iterable

from workers.engine.engine import Chunk
from workers.engine.sequence import Sequence


def schedule(sequences: Iterable[Sequence], max_tokens: int, min_prefill: int = 16) -> list[Chunk]:
    """Every sequence with one token pending decodes; what is left of `max_tokens` goes to longer ones in
    order.

    However many decode, `min_prefill` tokens of prefill go along, so that a new request cannot starve.
    """
    decodes: list[Sequence] = []
    rest: list[Sequence] = []
    for sequence in sequences:
        (decodes if sequence.pending == 1 else rest).append(sequence)
    chunks = [Chunk(sequence, 1) for sequence in decodes]
    budget = max(max_tokens - len(decodes), min_prefill)
    for sequence in rest:
        if budget == 0:
            break
        count = min(sequence.pending, budget)
        chunks.append(Chunk(sequence, count))
        budget -= count
    return chunks
