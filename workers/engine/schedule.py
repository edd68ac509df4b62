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


def schedule_paced(sequences: Iterable[Sequence], max_tokens: int, prompt_tokens: int) -> list[Chunk]:
    """As `schedule` for sequences that are in their answers; of those still in their prompts the first one alone gets
    up to `prompt_tokens`. So each prompt is done when its own tokens have taken their time, first come, first served.
    """
    answering: list[Sequence] = []
    prompts: list[Sequence] = []
    for sequence in sequences:
        (prompts if sequence.computed < sequence.prompt_len else answering).append(sequence)
    return schedule(answering, max_tokens) + [Chunk(first, min(first.pending, prompt_tokens)) for first in prompts[:1]]
