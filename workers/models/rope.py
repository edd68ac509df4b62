"""Rotary position embedding (Su et al., 2021) as one complex multiplication, with the scaling that checkpoints ask for.

Owns the table and the pair layout. Everywhere in pddbed the two numbers of a rotated pair are neighbours, as in Meta's
own Llama code and in GGUF files of the llama architecture. Hugging Face keeps the halves of a head apart;
`interleave` brings such weights into our layout, once, at load time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workers.models.config import ModelConfig, ModelError


def rope_table(config: ModelConfig) -> np.ndarray:
    """Complex numbers of magnitude `rope_magnitude`, `[context_length, rope_dim / 2]`, complex64.

    Frequencies and angles are rounded to float32 as transformers rounds them: at position 5,000 a
    difference of one float32 step in a frequency already turns a pair by 3e-4.
    """
    exponents = np.arange(0, config.rope_dim, 2, dtype=np.float64) / config.rope_dim
    frequencies = (1.0 / config.rope_theta**exponents).astype(np.float32)
    if config.rope_factors is not None:
        frequencies = (frequencies / np.asarray(config.rope_factors, np.float32)).astype(np.float32)
    angles = np.arange(config.context_length, dtype=np.float32)[:, None] * frequencies
    return (np.exp(1j * angles.astype(np.float64)) * config.rope_magnitude).astype(np.complex64)


def rotate(heads: torch.Tensor, phases: torch.Tensor) -> None:
    """Rotates `heads [tokens, heads, rope_dim]` in place by `phases [tokens, 1, rope_dim / 2]`."""
    if heads.dtype == torch.float32:
        torch.view_as_complex(heads.unflatten(-1, (-1, 2))).mul_(phases)
        return
    rotated = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2))).mul_(phases)
    heads.copy_(torch.view_as_real(rotated).flatten(-2))


def interleave(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders the first axis, head by head, from halves apart (Hugging Face) to pairs together."""
    heads = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def llama3_factors(
    config_head_dim: int, theta: float, factor: float, low: float, high: float, original_context: int
) -> tuple[float, ...]:
    """Divisors of the rotary frequencies in Llama 3.1+: long waves slow down by `factor`, short ones stay.

    As published with Llama 3.1 (`rope_scaling` of type "llama3"): wavelengths above original_context / low
    are divided by `factor`, those below original_context / high are kept, and between the two it is
    interpolated.
    """
    factors = []
    for pair in range(config_head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / config_head_dim)
        smooth = (original_context / wavelength - low) / (high - low)
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1.0 / ((1 - smooth) / factor + smooth))
    return tuple(factors)


def yarn_factors(
    dim: int, theta: float, factor: float, fast: float, slow: float, original_context: int, truncate: bool
) -> tuple[float, ...]:
    """Divisors of the rotary frequencies in YaRN (Peng et al., 2023, section 3.2).

    Pairs that turn more than `fast` times in the original context stay as they are, those that turn less than
    `slow` times slow down by `factor`, and between the two, counted in pairs, it is interpolated.
    """

    def pair_of(turns: float) -> float:
        return dim * math.log(original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(fast), pair_of(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    factors = []
    for pair in range(dim // 2):
        slowed = min(1.0, max(0.0, (pair - low) / width))
        factors.append(1.0 / (slowed / factor + 1.0 - slowed))
    return tuple(factors)


ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("attention_factor", "truncate"),
    ),
}
"""Rope types that are honoured, with the keys of each; `rope_theta` and the type's own name besides."""


@dataclass(frozen=True)
class Rope:
    """Base and frequency divisors; YaRN's factors of what is rotated and, in DeepSeek models, of the products."""

    theta: float
    factors: tuple[float, ...] | None = None
    magnitude: float = 1.0
    sharpness: float = 1.0


def hf_rope(place: Path, given: Mapping[str, Any], dim: int) -> Rope:
    """The rotation that `given`, a `config.json`, asks for in heads of `dim` rotated numbers, or ModelError.

    transformers 5 writes `rope_parameters`, earlier ones `rope_theta` and `rope_scaling`, which wins over the other.
    """
    rope = given.get("rope_scaling") or given.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_KEYS:
        raise ModelError(
            f'{place}: rope scaling "{kind}" is not supported, only {", ".join(ROPE_KEYS)}; take another model'
        )
    for key, value in rope.items():
        known = (*ROPE_KEYS[kind], "rope_type", "type", "rope_theta")
        if key not in known and value is not None and not (key in ("partial_rotary_factor", "factor") and value == 1):
            raise ModelError(
                f'{place}: {key} = {str(value)[:60]} of rope scaling "{kind}" is not supported; take another model'
            )
    theta = next((t for t in (rope.get("rope_theta"), given.get("rope_theta")) if t is not None), 10_000.0)
    if not rope.get("factor", 1) > 0:
        raise ModelError(f"{place}: a factor of {rope['factor']} makes no frequencies; fetch the checkpoint again")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, (rope["factor"],) * (dim // 2))
    original = rope.get("original_max_position_embeddings") or given["max_position_embeddings"]
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        return Rope(theta, llama3_factors(dim, theta, rope["factor"], low, high, original))
    fast, slow = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1
    factors = yarn_factors(dim, theta, rope["factor"], fast, slow, original, rope.get("truncate", True))
    return Rope(theta, factors, *_yarn_magnitudes(rope))


def _yarn_magnitudes(rope: Mapping[str, Any]) -> tuple[float, float]:
    """(what rotated numbers are multiplied with, what products are): YaRN's attention temperature.

    0.1 ln(factor) + 1 on both sides of the product; DeepSeek moves it, by `mscale_all_dim`, to the product as a whole,
    so that the numbers that are not rotated feel it too.
    """

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    one, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    rotated = rope.get("attention_factor")
    if rotated is None:
        rotated = magnitude(one) / magnitude(all_dim) if one and all_dim else magnitude(1.0)
    return rotated, magnitude(all_dim) ** 2 if all_dim else 1.0
