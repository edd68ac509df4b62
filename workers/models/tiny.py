"""The built-in `tiny` and `tiny-mla` models: seeded random weights, no download, a millisecond a token.

Its spread is wide on purpose. At the customary 0.02 a random model repeats one token whatever its KV holds,
and a test of equality passes with broken KV; here the answer depends on every block. Only printable
characters (and, rarely, the end of the text) have an output weight, so that answers can be read.
"""

from __future__ import annotations

import numpy as np

from workers.models.config import Latent, ModelConfig
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


TINY_MLA = ModelConfig(
    name="tiny-mla",
    layers=4,
    hidden=128,
    intermediate=256,
    heads=8,
    kv_heads=1,
    head_dim=48 + 16,
    vocab=BYTE_VOCAB,
    context_length=4096,
    tied=False,
    bos_id=BOS,
    eos_ids=(EOS,),
    latent=Latent(kv_rank=48, rope_dim=16, nope_dim=16, value_dim=16, query_rank=64),
)
"""Half of `tiny`'s KV: 64 numbers a token and layer."""

_SHARP = ("qkv", "first", "q_up", "k_up")


def tiny_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Weights of `TINY` or `TINY_MLA`, float32; the same for a seed on every machine (numpy's PCG64)."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        if name.endswith("norm"):
            weights[name] = np.ones(shape, np.float32)
        else:
            std = QKV_STD if name.endswith(_SHARP) else STD
            weights[name] = random.normal(0.0, std, shape).astype(np.float32)
    scale = np.zeros(config.vocab, np.float32)
    scale[ord(" ") : ord("~") + 1] = 1.0
    scale[EOS] = EOS_STD / STD
    weights["head"] *= scale
    return weights
