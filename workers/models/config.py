"""The shape of a decoder-only model and the name under which one is asked for. Owns no weights."""

from __future__ import annotations

from dataclasses import dataclass


class ModelError(Exception):
    """A model that cannot be had: one sentence naming it, what is wrong and the next step."""


@dataclass(frozen=True)
class ModelSpec:
    """What to load: `name` is a built-in or fetched model, a Hugging Face directory or a `.gguf` file.

    `seed` draws the weights of built-in models; `dtype` is float32, bfloat16 or float16.
    """

    name: str
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"


@dataclass(frozen=True)
class ModelConfig:
    """Hyper-parameters of a Llama-family decoder (Llama, SmolLM2, Mistral, Qwen2, Qwen3).

    `rope_factors` divide the rotary frequencies, one a pair (Llama 3's long-context scaling), `tied` reuses
    the embedding as output head. Token ids in `eos_ids` end an answer.
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

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """Shape of the KV of one token: `[layers, 2, kv_heads, head_dim]`, key before value."""
        return (self.layers, 2, self.kv_heads, self.head_dim)

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused projection: queries, then keys, then values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelError(
                f'model "{self.name}": {self.heads} heads cannot share {self.kv_heads} KV heads evenly; '
                "the configuration is broken, fetch the model again"
            )
