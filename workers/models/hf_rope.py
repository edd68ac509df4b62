"""Rotary scaling in `config.json`: which frequencies, and YaRN's temperatures, a checkpoint asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.models.config import ModelError
from workers.models.rope import llama3_factors, yarn_factors

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
    """What `given`, the content of `config.json`, asks for in heads of `dim` rotated numbers. Raises ModelError.

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
