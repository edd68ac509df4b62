"""Drives the engine step by step, checking the pool after every one."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

import torch

from workers.engine import BlockPool, Chunk, Engine, Sampling, Sequence
from workers.models import LoadedModel, ModelSpec, load_model
from workers.models.fetch import BUILT_IN

LENGTHS = [1, 15, 16, 17, 500]

TEXT = (
    "A datacenter is a building full of computers, and two datacenters are two buildings with a long cable between "
    "them. Whoever sends a letter through that cable waits: light needs five milliseconds for a thousand kilometres, "
    "and routers on the way add their own. When many letters leave at the same moment they queue, as cars do before "
    "a bridge, and the last one arrives late although the bridge is as short as ever. Engineers call the width of "
    "the bridge bandwidth and the length of the trip latency, and they know that money buys the first but not the "
    "second. So they try to send less. A model that answers questions keeps notes about everything it has read, two "
    "vectors for each word and each layer, and these notes are far larger than the words themselves. If the reader "
    "sits in one building and the writer in the other, the notes must travel. But if the writer has met the same "
    "beginning before, it still has those notes, and only what is new has to cross. And the words that the model "
    "writes are small: a few bytes each. It is cheaper to send the words and to think again than to send the "
    "thoughts. That is the whole idea, and the rest is care: which building starts, when the other takes over, and "
    "how nobody notices. The first building keeps talking while the notes travel, as a good host entertains the "
    "guests until dinner is served; then the second goes on in the middle of a sentence. Nothing may be lost, "
    "nothing may be said twice, and if the cable breaks the host simply keeps talking until it is mended again."
)


def prompt(loaded: LoadedModel, length: int) -> list[int]:
    """`length` tokens: printable noise for the byte model, prose for a trained one."""
    if loaded.config.name in BUILT_IN:
        source = random.Random(length)
        return [source.randint(ord(" "), ord("~")) for _ in range(length)]
    ids = loaded.tokenizer.encode(TEXT + " " + TEXT)
    assert len(ids) >= length
    return ids[:length]


def repetitive_model() -> LoadedModel:
    """A `tiny` that hardly looks at its context, and so repeats itself as people do who edit code."""
    loaded = load_model(ModelSpec("tiny"))
    for layer in loaded.model.layers:
        layer.heads.qkv.mul_(0.1)
    return dataclasses.replace(loaded, fingerprint="repetitive")


class Stand:
    """An engine with a pool of its own."""

    def __init__(self, loaded: LoadedModel, num_blocks: int = 80, block_size: int = 16) -> None:
        self.loaded = loaded
        self.pool = BlockPool(loaded.config, num_blocks, block_size, loaded.spec.dtype)
        self.engine = Engine(loaded, self.pool)
        self.sequences: list[Sequence] = []
        self.held: list[int] = []
        """Blocks that someone else holds."""

    def admit(self, tokens: Iterable[int], prompt_len: int | None = None, max_tokens: int = 32) -> Sequence:
        tokens = list(tokens)
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        sequence = Sequence(str(len(self.sequences)), tokens, prompt_len or len(tokens), sampling)
        self.engine.admit(sequence)
        self.sequences.append(sequence)
        return sequence

    def step(self, *chunks: Chunk) -> None:
        self.engine.step(chunks)
        self.check()

    def feed(self, sequence: Sequence, chunk: int) -> None:
        """Computes everything pending, `chunk` tokens a step."""
        target = len(sequence.tokens)
        while sequence.computed < target:
            self.step(Chunk(sequence, min(chunk, target - sequence.computed)))

    def finish(self, *sequences: Sequence) -> None:
        """Decodes all of `sequences` side by side to their ends."""
        while running := [s for s in sequences if s.finish_reason is None]:
            self.step(*(Chunk(s, s.pending) for s in running))

    def answer(self, sequence: Sequence) -> list[int]:
        return sequence.tokens[sequence.prompt_len :]

    def kv(self, sequence: Sequence, tokens: int) -> torch.Tensor:
        """KV of the first `tokens` tokens, `[tokens, *kv_shape]`."""
        return self.pool.storage[sequence.blocks].flatten(0, 1)[:tokens]

    def check(self) -> None:
        self.pool.check_integrity([self.held, *(s.blocks for s in self.sequences)])


def relative_difference(kv: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference of two KV tensors, as a share of the largest key magnitude (or latent) of the reference."""
    assert kv.shape == reference.shape
    keys = reference if reference.ndim == 3 else reference[:, :, 0]
    return float((kv - reference).abs().max() / keys.abs().max())
