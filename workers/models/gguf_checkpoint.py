"""GGUF files as models: names and layouts of llama.cpp's llama, qwen2 and qwen3 architectures. Owns no format.

In the llama architecture llama.cpp stores query and key rows as neighbouring pairs, which is our layout; the Qwen
architectures keep Hugging Face's halves and are interleaved here. Every key of an architecture is honoured, neutral or
refused by name; the table in docs/engine.md says which.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from workers.models.assemble import Names, assemble
from workers.models.config import ModelConfig, ModelError, model_name
from workers.models.gguf_file import GgufFile
from workers.models.gguf_tokenizer import gguf_bos_id, gguf_end_ids, gguf_tokenizer
from workers.models.rope import yarn_factors
from workers.models.tokenizer import TextTokenizer

_PAIRED = {"llama": True, "qwen2": False, "qwen3": False}
_NAMES = Names(
    embed="token_embd",
    head="output",
    norm="output_norm",
    layer="blk.{}.",
    attn_norm="attn_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    out="attn_output",
    ffn_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)

HONOURED = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.dimension_count", "rope.freq_base"),
    *("rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)
NEUTRAL = ("tensor_data_layout", "rope.scaling.finetuned", "attention.layer_norm_epsilon", "expert_used_count")
"""Keys without effect here: the last two belong to norms and experts that these models do not have."""
ONLY: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attention.scale": (0,),
    "pooling_type": (0,),
    "nextn_predict_layers": (0,),
    "leading_dense_block_count": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
}
"""Keys that are accepted with these values only, which mean that there is no such thing."""


def load_gguf(path: Path) -> tuple[ModelConfig, dict[str, np.ndarray], TextTokenizer]:
    """Configuration, fused float32 weights and tokenizer of a `.gguf` file. Raises ModelError."""
    file = GgufFile(path)
    config = gguf_config(file)
    weights = assemble(config, _NAMES, file.tensor, _PAIRED[file.architecture])
    file.check_all_used()
    return config, weights, gguf_tokenizer(file)


def gguf_config(file: GgufFile) -> ModelConfig:
    """The configuration in a file's metadata; refuses what the decoder does not compute."""
    if file.architecture not in _PAIRED:
        raise ModelError(
            f'{file.path}: architecture "{file.architecture}" is not supported; take one of {", ".join(_PAIRED)}'
        )
    _check_keys(file)
    hidden, heads = file.get("embedding_length"), _same(file, "attention.head_count")
    head_dim = file.get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.get(key, head_dim) != head_dim:
            raise ModelError(
                f"{file.path}: {file.architecture}.{key} = {file.get(key)} is not supported in heads of {head_dim}; "
                "take another model"
            )
    vocab = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    if file.get("vocab_size", vocab) != vocab:
        raise ModelError(
            f"{file.path}: {file.architecture}.vocab_size = {file.get('vocab_size')}, but it has {vocab} tokens; "
            "fetch it again"
        )
    factors, magnitude = _rope(file, head_dim)
    return ModelConfig(
        name=model_name(file.path),
        layers=file.get("block_count"),
        hidden=hidden,
        intermediate=_same(file, "feed_forward_length"),
        heads=heads,
        kv_heads=_same(file, "attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=vocab,
        context_length=min(file.get("context_length"), file.get("attention.sliding_window", 0) or math.inf),
        rope_theta=file.get("rope.freq_base", 10_000.0),
        rope_factors=factors,
        rope_magnitude=magnitude,
        rms_eps=file.get("attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in file,
        qkv_bias="blk.0.attn_q.bias" in file,
        qk_norm=file.architecture == "qwen3",
        bos_id=gguf_bos_id(file),
        eos_ids=gguf_end_ids(file),
    )


def _rope(file: GgufFile, head_dim: int) -> tuple[tuple[float, ...] | None, float]:
    """(divisors of the frequencies, magnitude of what is rotated), as llama.cpp takes them from keys and tensors.

    Without a type the scaling is linear; `rope.scale_linear` is an older name of its factor. `rope_freqs` divide the
    frequencies besides.
    """
    kind = file.get("rope.scaling.type", "linear")
    factor = file.get("rope.scaling.factor", 0) or file.get("rope.scale_linear", 0) or 1.0
    magnitude = file.get("rope.scaling.attn_factor", 1.0)
    pairs = head_dim // 2
    if kind == "yarn":
        original = file.get("rope.scaling.original_context_length", 0) or file.get("context_length")
        fast, slow = file.get("rope.scaling.yarn_beta_fast", 32.0), file.get("rope.scaling.yarn_beta_slow", 1.0)
        theta = file.get("rope.freq_base", 10_000.0)
        factors = np.asarray(yarn_factors(head_dim, theta, factor, fast, slow, original, truncate=True))
        magnitude *= 1 + 0.1 * math.log(factor)
    elif kind in ("none", "linear"):
        factors = np.full(pairs, factor if kind == "linear" else 1.0)
    else:
        raise ModelError(
            f'{file.path}: rope scaling "{kind}" is not supported, only linear and yarn; take another model'
        )
    if "rope_freqs.weight" in file and file.architecture == "llama":
        factors = factors * file.tensor("rope_freqs.weight")
    if factors.shape != (pairs,) or not (np.isfinite(factors).all() and (factors > 0).all() and magnitude > 0):
        raise ModelError(f"{file.path}: its rope scaling makes no frequencies for heads of {head_dim}; fetch it again")
    return (None if (factors == 1).all() else tuple(factors.tolist())), magnitude


def _same(file: GgufFile, key: str, default: Any = None) -> Any:
    """A size that may be written once for all layers, or for each."""
    value = file.get(key, default)
    if not isinstance(value, np.ndarray):
        return value
    if len(value) == 0 or (value != value[0]).any():
        raise ModelError(
            f"{file.path}: {file.architecture}.{key} differs between layers, which is not supported; take another model"
        )
    return value[0].item()


def _check_keys(file: GgufFile) -> None:
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ModelError(f'{file.path}: general.type "{kind}" is no model by itself; take the model\'s own file')
    for name, value in file.metadata.items():
        key = name.removeprefix(file.architecture + ".")
        if key == name or key in HONOURED or key in NEUTRAL or (key in ONLY and value in ONLY[key]):
            continue
        shown = "" if isinstance(value, (list, np.ndarray)) else f" = {str(value)[:60]}"
        raise ModelError(f"{file.path}: {name}{shown} is not supported, and may change the answers; take another model")
