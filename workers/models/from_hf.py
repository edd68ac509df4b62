"""Hugging Face checkpoint directories as models: `config.json`, safetensors, `tokenizer.json`. Owns no
format.

Query and key rows are brought from halves into pairs (see `rope.py`); q, k, v and gate, up are fused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer as RawTokenizer

from workers.models.assemble import Names, assemble
from workers.models.config import ModelConfig, ModelError
from workers.models.rope import llama3_factors
from workers.models.text import TextTokenizer

_SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
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
)


def load_hf(directory: Path) -> tuple[ModelConfig, dict[str, np.ndarray], TextTokenizer]:
    """Configuration, fused float32 weights and tokenizer of a checkpoint directory. Raises ModelError."""
    config = hf_config(directory)
    return config, assemble(config, _NAMES, _Checkpoint(directory).read, paired=False), hf_tokenizer(directory, config)


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
    try:
        heads = given["num_attention_heads"]
        head_dim = given.get("head_dim") or given["hidden_size"] // heads
        theta, factors = _rope(directory, given, head_dim)
        window = given.get("sliding_window") if kind == "mistral" else None
        return ModelConfig(
            name=directory.name,
            layers=given["num_hidden_layers"],
            hidden=given["hidden_size"],
            intermediate=given["intermediate_size"],
            heads=heads,
            kv_heads=given.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            vocab=given["vocab_size"],
            # Beyond its sliding window a Mistral would need a mask that we do not have: end the context there.
            context_length=int(min(given["max_position_embeddings"], window or math.inf)),
            rope_theta=theta,
            rope_factors=factors,
            rms_eps=given.get("rms_norm_eps", 1e-6),
            tied=given.get("tie_word_embeddings", False),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
            bos_id=given.get("bos_token_id"),
            eos_ids=_eos_ids(directory, given),
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


def _rope(directory: Path, given: Mapping[str, Any], head_dim: int) -> tuple[float, tuple[float, ...] | None]:
    """Base and frequency divisors. transformers 5 writes `rope_parameters`, earlier ones two separate keys."""
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or given.get("rope_theta") or 10_000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, (rope["factor"],) * (head_dim // 2)
    if kind == "llama3":
        return theta, llama3_factors(
            head_dim,
            theta,
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
    raise ModelError(f'{directory}: rope scaling "{kind}" is not supported, only llama3 and linear; take another model')


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
