"""Weights by their names inside pddbed, as numpy arrays, and the way from there to tensors.

Loading touches no torch operation: workers are forked from a process that holds the weights, and torch's
thread pools, once started, do not survive a fork. numpy converts, fuses and fingerprints; torch only wraps
the memory.

Names: `head`, `norm`, `embed` (absent when tied to the head) and per layer `layers.N.` + `attn_norm`,
`ffn_norm`, `gate_up`, `down`, `out` and those of its attention: `qkv`, `qkv_bias`, `q_norm`, `k_norm`, or for
latent attention `first` (side by side: queries or their latent, the KV latent, the shared key), `kv_norm`,
`k_up`, `v_up`, `q_norm`, `q_up`. In layers with experts `gate_up` and `down` are the shared ones', beside
`router`, `router_bias`, `experts_gate_up` and `experts_down`.

Matrices are `[inputs, outputs]`, the other way round than in checkpoints: a single token then reads them at
twice the speed (22 against 12 GB/s, MKL). Only `embed` keeps a row a token. Rotated outputs are in the pair
layout of `rope.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash

from workers.models.config import Latent, ModelConfig, ModelError

Weights = Mapping[str, np.ndarray]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight the model needs, with its shape."""
    shapes = _outer_shapes(config)
    for index in range(config.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer_shapes(config, index).items()}
    return shapes


def _outer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"norm": (config.hidden,), "head": (config.hidden, config.vocab)}
    return shapes if config.tied else shapes | {"embed": (config.vocab, config.hidden)}


def _layer_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    return {
        "attn_norm": (config.hidden,),
        **(_latent_shapes(config, config.latent) if config.latent else _grouped_shapes(config)),
        "ffn_norm": (config.hidden,),
        **_ffn_shapes(config, index),
    }


def _ffn_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    experts, hidden = config.experts, config.hidden
    if experts is None or not config.mixed(index):
        return {"gate_up": (hidden, 2 * config.intermediate), "down": (config.intermediate, hidden)}
    shapes: dict[str, tuple[int, ...]] = {
        "gate_up": (hidden, 2 * experts.shared),
        "down": (experts.shared, hidden),
        "router": (hidden, experts.count),
        "experts_gate_up": (experts.count, hidden, 2 * experts.intermediate),
        "experts_down": (experts.count, experts.intermediate, hidden),
    }
    return shapes | ({"router_bias": (experts.count,)} if experts.biased else {})


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


def check_memory(config: ModelConfig) -> None:
    """Raises ModelError when the weights, as float32, exceed what the machine has free: before any is read."""

    def size(shapes: Mapping[str, tuple[int, ...]]) -> int:
        return 4 * sum(map(math.prod, shapes.values()))

    # layer by layer would take for ever where a damaged file names a billion of them
    plain = min(config.layers, config.experts.first_layer if config.experts else config.layers)
    needed = size(_outer_shapes(config)) + plain * size(_layer_shapes(config, 0))
    needed += (config.layers - plain) * size(_layer_shapes(config, plain))
    table = 16 * config.context_length * config.rope_dim  # the rotary table while it is made
    free = _available_bytes()
    for what, size_bytes, smaller in (("weights take", needed, "model"), ("positions take", table, "context")):
        if size_bytes > free:
            raise ModelError(
                f'model "{config.name}": its {what} {size_bytes / 1e9:.1f} GB as float32, this machine has '
                f"{free / 1e9:.1f} GB of memory free; take a smaller {smaller}"
            )


def _available_bytes() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


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
