"""The shape of a decoder-only model and the name under which one is asked for. Owns no weights."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

_PART = re.compile(r"-(\d{5})-of-(\d{5})$")


class ModelError(Exception):
    """A model that cannot be had: one sentence naming it, what is wrong and the next step."""


def model_name(path: Path) -> str:
    """The name that clients give the model at `path`: the last part of the path, whatever dots are in it.

    A GGUF file's name goes without its ending and its number among several parts, and a snapshot in a Hugging Face
    cache has its repository's name.
    """
    place = Path(os.path.abspath(path))  # noqa: PTH100 - a symbolic link is a name like any other
    if place.parent.name == "snapshots" and place.parent.parent.name.startswith("models--"):
        return place.parent.parent.name.rpartition("--")[2]
    if path.is_dir() or place.suffix.lower() != ".gguf":
        return place.name or str(place)
    return _PART.sub("", place.stem)


class ModelSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A model to load: `name` is a built-in or fetched model, a Hugging Face directory or a `.gguf` file.

    `seed` draws the weights of built-in models; `dtype` is float32, bfloat16 or float16.
    """

    name: Annotated[str, Meta(min_length=1)]
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


@dataclass(frozen=True)
class Latent:
    """Sizes of DeepSeek's multi-head latent attention: a token's KV is `kv_rank + rope_dim` numbers a layer.

    A head's query has `nope_dim` numbers that meet the latent and `rope_dim` rotated ones, a head's result has
    `value_dim`. `query_rank`: queries come out of a latent of their own as well.
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None

    @property
    def query_dim(self) -> int:
        """Width of one head's query."""
        return self.nope_dim + self.rope_dim

    def query_width(self, heads: int) -> int:
        """Numbers that the first projection makes for all queries."""
        return self.query_rank or heads * self.query_dim


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the layers from `first_layer` on: `active` of `count` experts, `intermediate` wide each.

    `shared` is the width of what every token goes through beside them. `sigmoid`: V3's scores, else softmax; with
    `groups` the experts are taken out of the best `groups_kept` only. Shares are `normalised` or not, then scaled.
    """

    count: int
    active: int
    intermediate: int
    shared: int
    first_layer: int = 0
    sigmoid: bool = False
    biased: bool = False
    groups: int = 1
    groups_kept: int = 1
    normalised: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Hyper-parameters of a decoder: the Llama family (Llama, SmolLM2, Mistral, Qwen2, Qwen3) or, with a `latent`,
    DeepSeek's.

    `rope_factors` divide the rotary frequencies, one a pair (Llama 3's and YaRN's long-context scaling),
    `rope_magnitude` multiplies what is rotated (YaRN), `tied` reuses the embedding as output head. Token ids in
    `eos_ids` end an answer. With a latent, all heads share one KV head of `head_dim` = `kv_rank + rope_dim`.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_length: int
    rope_theta: float = 10_000.0
    rope_factors: tuple[float, ...] | None = None
    rms_eps: float = 1e-5
    tied: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    latent: Latent | None = None
    experts: Experts | None = None
    rope_magnitude: float = 1.0
    attention_scale: float | None = None
    """Factor of query-key products; None: `head_dim`, as each head sees it, to the power of -1/2."""

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """Shape of the KV of one token: `[layers, 2, kv_heads, head_dim]`, key before value; with a latent
        `[layers, kv_rank + rope_dim]`, latent before rotated key.
        """
        return (self.layers, self.head_dim) if self.latent else (self.layers, 2, self.kv_heads, self.head_dim)

    def mixed(self, layer: int) -> bool:
        """True if a layer has experts."""
        return self.experts is not None and layer >= self.experts.first_layer

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that are rotated."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def scale(self) -> float:
        """Factor of query-key products."""
        return self.attention_scale or (self.latent.query_dim if self.latent else self.head_dim) ** -0.5

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused projection: queries, then keys, then values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def __post_init__(self) -> None:
        for size in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "context_length"):
            value = getattr(self, size)
            if type(value) is not int or value < 1:
                raise ModelError(
                    f'model "{self.name}": {size} = {value!r} is no positive number; fetch the model again'
                )
        theta = self.rope_theta
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
            raise ModelError(f'model "{self.name}": rope_theta = {theta} makes no frequencies; fetch the model again')
        if self.rope_dim % 2 or not 0 < self.rms_eps < 1:
            raise ModelError(
                f'model "{self.name}": it cannot rotate heads of {self.rope_dim} numbers, or divide by a norm of '
                f"epsilon {self.rms_eps}; the configuration is broken, fetch the model again"
            )
        if self.heads % self.kv_heads:
            raise ModelError(
                f'model "{self.name}": {self.heads} heads cannot share {self.kv_heads} KV heads evenly; '
                "the configuration is broken, fetch the model again"
            )
        if self.latent and (self.kv_heads, self.head_dim) != (1, self.latent.kv_rank + self.latent.rope_dim):
            raise ModelError(
                f'model "{self.name}": latent attention has one KV head of {self.latent.kv_rank} + '
                f"{self.latent.rope_dim} numbers, not {self.kv_heads} of {self.head_dim}"
            )
