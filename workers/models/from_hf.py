"""Hugging Face checkpoint directories as models: `config.json`, safetensors, `tokenizer.json`. Owns no
format.

Query and key rows are brought from halves into pairs (see `rope.py`); q, k, v and gate, up are fused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer as RawTokenizer

from workers.models.assemble import Names, assemble
from workers.models.config import Experts, Latent, ModelConfig, ModelError
from workers.models.rope import llama3_factors, yarn_factors
from workers.models.text import TextTokenizer

_SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3")
_NAMES = Names(
    embed="model.embed_tokens",
    head="lm_head",
    norm="model.norm",
    layer="model.layers.{}.",
    attn_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    out="self_attn.o_proj",
    ffn_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    q_a="self_attn.q_a_proj",
    q_a_norm="self_attn.q_a_layernorm",
    q_b="self_attn.q_b_proj",
    kv_a="self_attn.kv_a_proj_with_mqa",
    kv_a_norm="self_attn.kv_a_layernorm",
    kv_b="self_attn.kv_b_proj",
    router="mlp.gate",
)


def load_hf(directory: Path) -> tuple[ModelConfig, dict[str, np.ndarray], TextTokenizer]:
    """Configuration, fused float32 weights and tokenizer of a checkpoint directory. Raises ModelError."""
    given = _read_json(directory / "config.json")
    config = hf_config(directory)
    # DeepSeek's own code rotates neighbours; checkpoints that were converted say so.
    paired = config.latent is not None and given.get("rope_interleave", True)
    weights = assemble(config, _NAMES, _Checkpoint(directory).read, paired)
    return config, weights, hf_tokenizer(directory, config)


def hf_config(directory: Path) -> ModelConfig:
    """The configuration in `config.json`; refuses what the decoder does not compute."""
    given = _read_json(directory / "config.json")
    kind = given.get("model_type")
    if kind not in _SUPPORTED:
        raise ModelError(f'{directory}: model type "{kind}" is not supported; take one of {", ".join(_SUPPORTED)}')
    for key, only in {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}.items():
        if given.get(key, only) != only:
            raise ModelError(f"{directory}: {key} = {given[key]} is not supported, only {only}; take another model")
    if kind != "qwen2" and given.get("attention_bias", False):
        raise ModelError(f"{directory}: attention_bias is not supported for {kind}; take another model")
    if given.get("quantization_config"):
        raise ModelError(f"{directory}: quantised weights are not supported; take the model in bfloat16 or float32")
    try:
        heads = given["num_attention_heads"]
        deepseek = kind.startswith("deepseek")
        latent = _latent(given) if deepseek else None
        head_dim = given.get("head_dim") or given["hidden_size"] // heads
        rope = _rope(directory, given, latent.rope_dim if latent else head_dim)
        window = given.get("sliding_window") if kind == "mistral" else None
        return ModelConfig(
            name=directory.name,
            layers=given["num_hidden_layers"],
            hidden=given["hidden_size"],
            intermediate=given["intermediate_size"],
            heads=heads,
            kv_heads=1 if latent else given.get("num_key_value_heads") or heads,
            head_dim=latent.kv_rank + latent.rope_dim if latent else head_dim,
            vocab=given["vocab_size"],
            # Beyond its sliding window a Mistral would need a mask that we do not have: end the context there.
            context_length=int(min(given["max_position_embeddings"], window or math.inf)),
            rope_theta=rope.theta,
            rope_factors=rope.factors,
            rms_eps=given.get("rms_norm_eps", 1e-6),
            tied=given.get("tie_word_embeddings", False),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
            bos_id=given.get("bos_token_id"),
            eos_ids=_eos_ids(directory, given),
            latent=latent,
            experts=_experts(directory, given) if deepseek else None,
            rope_magnitude=rope.magnitude,
            attention_scale=latent.query_dim**-0.5 * rope.sharpness if latent else None,
        )
    except KeyError as error:
        raise ModelError(
            f"{directory}/config.json lacks {error}; the checkpoint is incomplete, fetch it again"
        ) from error


def hf_tokenizer(directory: Path, config: ModelConfig) -> TextTokenizer:
    """The tokenizer in `tokenizer.json` with the chat template beside it, if there is one."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{path} is missing; fetch the checkpoint again, with its tokenizer")
    try:
        raw = RawTokenizer.from_file(str(path))
    except Exception as error:  # the package raises a bare Exception
        raise ModelError(f"{path} is not a readable tokenizer ({error}); fetch it again") from error
    template_file = directory / "chat_template.jinja"
    template: Any = None
    if template_file.exists():
        template = template_file.read_text()
    elif (directory / "tokenizer_config.json").exists():
        template = _read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several by name: take the one for plain chat
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return TextTokenizer(raw, eos_ids=config.eos_ids, bos_id=config.bos_id, chat_template=template)


class _Checkpoint:
    """The tensors of all `*.safetensors` files in a directory, by name, as float32 arrays."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = {}
        for path in sorted(directory.glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is not a readable safetensors file ({error}); fetch it again") from error
            self._files.update(dict.fromkeys(file.keys(), file))
        if not self._files:
            raise ModelError(f"{directory} holds no .safetensors file; convert or fetch the checkpoint")

    def read(self, name: str) -> np.ndarray:
        if name not in self._files:
            raise ModelError(
                f"{self._directory}: weight {name} is missing; the checkpoint is incomplete, fetch it again"
            )
        return _to_float32(self._files[name].get_tensor(name))


def _to_float32(tensor: torch.Tensor) -> np.ndarray:
    """Without a torch operation (see `weights.py`): bfloat16 is the upper half of float32."""
    if tensor.dtype == torch.bfloat16:
        return (tensor.view(torch.uint16).numpy().astype(np.uint32) << 16).view(np.float32)
    return tensor.numpy().astype(np.float32, copy=False)


def _experts(directory: Path, given: Mapping[str, Any]) -> Experts | None:
    """DeepSeek's mixture of experts; refuses what its two known kinds do not have."""
    third = given["model_type"] == "deepseek_v3"
    first, count = given.get("first_k_dense_replace", 0), given.get("n_routed_experts")
    if not count or first >= given["num_hidden_layers"]:
        return None
    method = "noaux_tc" if third else given.get("topk_method", "greedy")
    for key, value, known in (
        ("topk_method", given.get("topk_method", method), (method,) if third else ("greedy", "group_limited_greedy")),
        ("moe_layer_freq", given.get("moe_layer_freq", 1), (1,)),
        ("norm_topk_prob", given.get("norm_topk_prob", third), (True, False) if third else (False,)),
    ):
        if value not in known:
            raise ModelError(f"{directory}: {key} = {value} is not supported, only {known[0]}; take another model")
    grouped = third or method == "group_limited_greedy"
    return Experts(
        count=count,
        active=given["num_experts_per_tok"],
        intermediate=given["moe_intermediate_size"],
        shared=given["moe_intermediate_size"] * given["n_shared_experts"],
        first_layer=first,
        sigmoid=third,
        biased=third,
        groups=given["n_group"] if grouped else 1,
        groups_kept=given["topk_group"] if grouped else 1,
        normalised=given.get("norm_topk_prob", third),
        scale=given.get("routed_scaling_factor", 1.0),
    )


def _latent(given: Mapping[str, Any]) -> Latent:
    """DeepSeek's attention sizes."""
    return Latent(
        kv_rank=given["kv_lora_rank"],
        rope_dim=given["qk_rope_head_dim"],
        nope_dim=given["qk_nope_head_dim"],
        value_dim=given["v_head_dim"],
        query_rank=given.get("q_lora_rank"),
    )


@dataclass(frozen=True)
class _Rope:
    """Base and frequency divisors; YaRN's factors of what is rotated and, in DeepSeek models, of the products."""

    theta: float
    factors: tuple[float, ...] | None = None
    magnitude: float = 1.0
    sharpness: float = 1.0


def _rope(directory: Path, given: Mapping[str, Any], dim: int) -> _Rope:
    """transformers 5 writes `rope_parameters`, earlier ones two separate keys."""
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or given.get("rope_theta") or 10_000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return _Rope(theta)
    if kind == "linear":
        return _Rope(theta, (rope["factor"],) * (dim // 2))
    if kind == "llama3":
        original, low, high = (
            rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        return _Rope(theta, llama3_factors(dim, theta, rope["factor"], low, high, original))
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or given["max_position_embeddings"]
        fast, slow = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1
        factors = yarn_factors(dim, theta, rope["factor"], fast, slow, original, rope.get("truncate", True))
        return _Rope(theta, factors, *_yarn_magnitudes(rope))
    raise ModelError(
        f'{directory}: rope scaling "{kind}" is not supported, only llama3, yarn and linear; take another model'
    )


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


def _eos_ids(directory: Path, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer; `generation_config.json` knows the chat ones and wins where it exists."""
    generation = directory / "generation_config.json"
    found = _read_json(generation).get("eos_token_id") if generation.exists() else None
    if found is None:
        found = given.get("eos_token_id")
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (found,)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); it belongs to a checkpoint directory") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the checkpoint again") from error
