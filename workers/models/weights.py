"""Weights by their names inside pddbed, as numpy arrays, and the way from there to tensors.

Loading touches no torch operation: workers are forked from a process that holds the weights, and torch's
thread pools, once started, do not survive a fork. numpy converts, fuses and fingerprints; torch only wraps
the memory.

Names: `head`, `norm`, `embed` (absent when tied to the head) and per layer `layers.N.` + `attn_norm`,
`ffn_norm`, `gate_up`, `down`, `out` and those of its attention: `qkv`, `qkv_bias`, `q_norm`, `k_norm`, or for
latent attention `first` (side by side: queries or their latent, the KV latent, the shared key), `kv_norm`,
`k_up`, `v_up`, `q_norm`, `q_up`. Matrices are `[inputs, outputs]`, the other way round than in checkpoints:
a single token then reads them at twice the speed (22 against 12 GB/s, MKL). Only `embed` keeps a row a
token. Rotated outputs are in the pair layout of `rope.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import msgspec
import numpy as np
import torch
import xxhash

from workers.models.config import Latent, ModelConfig, ModelError

Weights = Mapping[str, np.ndarray]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight the model needs, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {
        "norm": (config.hidden,),
        "head": (config.hidden, config.vocab),
    }
    if not config.tied:
        shapes["embed"] = (config.vocab, config.hidden)
    for index in range(config.layers):
        layer = {
            "attn_norm": (config.hidden,),
            **(_latent_shapes(config, config.latent) if config.latent else _grouped_shapes(config)),
            "ffn_norm": (config.hidden,),
            "gate_up": (config.hidden, 2 * config.intermediate),
            "down": (config.intermediate, config.hidden),
        }
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _grouped_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "qkv": (config.hidden, config.qkv_rows),
        "out": (config.heads * config.head_dim, config.hidden),
    }
    if config.qkv_bias:
        shapes["qkv_bias"] = (config.qkv_rows,)
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    return shapes


def _latent_shapes(config: ModelConfig, latent: Latent) -> dict[str, tuple[int, ...]]:
    queries = latent.query_width(config.heads)
    shapes: dict[str, tuple[int, ...]] = {
        "first": (config.hidden, queries + latent.kv_rank + latent.rope_dim),
        "kv_norm": (latent.kv_rank,),
        "k_up": (config.heads, latent.nope_dim, latent.kv_rank),
        "v_up": (config.heads, latent.kv_rank, latent.value_dim),
        "out": (config.heads * latent.value_dim, config.hidden),
    }
    if latent.query_rank:
        shapes |= {"q_norm": (queries,), "q_up": (queries, config.heads * latent.query_dim)}
    return shapes


def check_shapes(config: ModelConfig, weights: Weights) -> None:
    """Raises ModelError unless `weights` are exactly what the configuration calls for."""
    for name, shape in expected_shapes(config).items():
        found = weights[name].shape if name in weights else None
        if found != shape:
            raise ModelError(
                f'model "{config.name}": weight {name} should have shape {shape}, found {found or "none"}; '
                "the checkpoint is incomplete or of another architecture, fetch it again"
            )


def fingerprint(config: ModelConfig, weights: Weights, dtype: str) -> str:
    """Identity of a model as 32 hex digits: equal exactly when configuration (but for its name), dtype
    and all weights are."""
    digest = xxhash.xxh3_128(msgspec.json.encode([asdict(config) | {"name": None}, dtype]))
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(weights[name]).data)
    return digest.hexdigest()


def to_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Wraps a float32 array without copying, or converts it to `dtype` with numpy alone."""
    if dtype == "float32":
        return torch.from_numpy(np.require(array, np.float32, ["C", "W"]))
    if dtype == "float16":
        return torch.from_numpy(array.astype(np.float16))
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)  # to nearest, ties to even
    return torch.from_numpy((rounded >> 16).astype(np.uint16)).view(torch.bfloat16)


def to_parameter(array: np.ndarray, dtype: str) -> torch.nn.Parameter:
    """The same as a frozen parameter of a module."""
    return torch.nn.Parameter(to_tensor(array, dtype), requires_grad=False)
