"""The built-in `tiny` model: seeded random weights, no download, a millisecond a token.

Its spread is wide on purpose. At the customary 0.02 a random model repeats one token whatever its KV holds,
and a test of equality passes with broken KV; here the answer depends on every block. Only printable
characters (and, rarely, the end of the text) have an output weight, so that answers can be read.
"""

from __future__ import annotations

import numpy as np

from workers.models.config import ModelConfig
from workers.models.tokenizer import BOS, BYTE_VOCAB, EOS
from workers.models.weights import expected_shapes

STD = 0.12
QKV_STD = 0.18  # sharp attention: with 0.12 some short prompts still fall into a loop
EOS_STD = 0.08

TINY = ModelConfig(
    name="tiny",
    layers=4,
    hidden=128,
    intermediate=256,
    heads=8,
    kv_heads=2,
    head_dim=32,
    vocab=BYTE_VOCAB,
    context_length=4096,
    tied=False,
    bos_id=BOS,
    eos_ids=(EOS,),
)


def tiny_weights(seed: int) -> dict[str, np.ndarray]:
    """Weights of `TINY`, float32; the same for a seed on every machine (numpy's PCG64)."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in expected_shapes(TINY).items():
        if name.endswith("norm"):
            weights[name] = np.ones(shape, np.float32)
        else:
            std = QKV_STD if name.endswith("qkv") else STD
            weights[name] = random.normal(0.0, std, shape).astype(np.float32)
    scale = np.zeros(TINY.vocab, np.float32)
    scale[ord(" ") : ord("~") + 1] = 1.0
    scale[EOS] = EOS_STD / STD
    weights["head"] *= scale
    return weights
