"""The control: one process decoding alone, with nothing between it and the model."""

from __future__ import annotations

from collections.abc import Sequence as List

from workers.engine.blocks import BlockPool
from workers.engine.engine import Chunk, Engine
from workers.engine.sampling import Sampling
from workers.engine.sequence import Sequence
from workers.models import LoadedModel


def generate(loaded: LoadedModel, tokens: List[int], sampling: Sampling, block_size: int = 16) -> list[int]:
    """The answer to the prompt `tokens`, the end-of-text token included. Any other way must give the same."""
    context = min(len(tokens) + sampling.max_tokens, loaded.config.context_length)
    pool = BlockPool(loaded.config, -(-context // block_size), block_size, loaded.spec.dtype, loaded.spec.device)
    engine = Engine(loaded, pool)
    sequence = Sequence("control", list(tokens), len(tokens), sampling)
    engine.admit(sequence)
    while sequence.finish_reason is None:
        engine.step([Chunk(sequence, sequence.pending)])
    return sequence.tokens[len(tokens) :]
