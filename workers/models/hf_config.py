"""`config.json` of a Hugging Face checkpoint as a ModelConfig, with the defaults of transformers.

Every key is honoured, neutral (it changes no answer), or refused by name; the table in docs/engine.md says which.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.models.config import Experts, Latent, ModelConfig, ModelError, model_name
from workers.models.rope import hf_rope

_MAX_JSON_BYTES = 4 << 20  # config.json has some kB, tokenizer_config.json of many added tokens some 100 kB

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
HONOURED = (
    *("model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "rope_theta", "rope_scaling", "rope_parameters"),
)
HONOURED_BY = {
    "mistral": ("sliding_window",),
    "qwen2": ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    "qwen3": ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    "deepseek_v2": (
        *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "first_k_dense_replace"),
        *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group"),
        *("topk_group", "topk_method", "routed_scaling_factor", "norm_topk_prob"),
    ),
}
HONOURED_BY["deepseek_v3"] = (*HONOURED_BY["deepseek_v2"], "rope_interleave")
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False, None),
    "attention_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "is_encoder_decoder": (False, None),
    "is_causal": (True, None),
    "moe_layer_freq": (1,),
    "scoring_func": ("softmax", "sigmoid"),
}
"""Keys that are accepted with these values only: with others we would compute something else."""
NEUTRAL = (
    *("_.*", ".*_version", "torch_dtype", "dtype", "use_cache", "initializer_.*", ".*dropout.*", ".*_pdrop"),
    *(
        "(pad|unk|sep|cls|mask|decoder_start)_token_id",
        "auto_map",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
    ),
    *("output_.*", "return_dict.*", "tokenizer_class", "model_max_length", "max_sequence_length", "unsloth_.*"),
    *("pretraining_tp", "chunk_size_feed_forward", "is_llama_config", "is_decoder", "attn_implementation"),
    *(r"transformers\.js_config", ".*_loss.*", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers"),
    *("qk_head_dim", "temperature", "top_[kp]", "typical_p", "do_sample", "(max|min)_length", "max_new_tokens"),
    *(".*_penalty", ".*no_repeat_ngram_size", "num_beams", "num_beam_groups", "num_return_sequences"),
)
"""Patterns of keys that change no answer: bookkeeping, training, generation settings that requests carry themselves."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    "deepseek_v2": {"q_lora_rank": 1536, "n_routed_experts": 64, "first_k_dense_replace": 0},
    "deepseek_v3": {
        **{"q_lora_rank": 1536, "n_routed_experts": 256, "first_k_dense_replace": 3, "norm_topk_prob": True},
        **{"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
    },
}
"""transformers' defaults of keys that a file may leave out, where they are not those of all families."""


def hf_config(directory: Path, given: dict[str, Any]) -> ModelConfig:
    """The configuration that `given`, the content of `config.json`, calls for; refuses what we do not compute."""
    place, kind = directory / "config.json", given.get("model_type")
    if kind not in FAMILIES:
        raise ModelError(f'{directory}: model type "{kind}" is not supported; take one of {", ".join(FAMILIES)}')
    _check_keys(place, kind, given)
    given = _DEFAULTS.get(kind, {}) | given
    try:
        heads = given["num_attention_heads"]
        deepseek = kind.startswith("deepseek")
        latent = _latent(given) if deepseek else None
        if latent and given.get("num_key_value_heads") not in (None, heads):
            raise ModelError(
                f"{place}: num_key_value_heads = {given['num_key_value_heads']} is not {heads}, as in DeepSeek"
            )
        head_dim = given.get("head_dim") or given["hidden_size"] // heads
        rope = hf_rope(place, given, latent.rope_dim if latent else head_dim)
        return ModelConfig(
            name=model_name(directory),
            layers=given["num_hidden_layers"],
            hidden=given["hidden_size"],
            intermediate=given["intermediate_size"],
            heads=heads,
            kv_heads=1 if latent else given.get("num_key_value_heads") or heads,
            head_dim=latent.kv_rank + latent.rope_dim if latent else head_dim,
            vocab=given["vocab_size"],
            # Beyond a sliding window we would need a mask that we do not have: end the context there.
            context_length=min(given["max_position_embeddings"], _window(place, kind, given) or math.inf),
            rope_theta=rope.theta,
            rope_factors=rope.factors,
            rms_eps=given.get("rms_norm_eps", 1e-6),
            tied=given.get("tie_word_embeddings", False),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
            bos_id=given.get("bos_token_id"),
            eos_ids=_eos_ids(directory, given),
            latent=latent,
            experts=_experts(place, given) if deepseek else None,
            rope_magnitude=rope.magnitude,
            attention_scale=latent.query_dim**-0.5 * rope.sharpness if latent else None,
        )
    except KeyError as error:
        raise ModelError(f"{place} lacks {error}; the checkpoint is incomplete, fetch it again") from error


def _check_keys(place: Path, kind: str, given: Mapping[str, Any]) -> None:
    architectures = given.get("architectures") or [FAMILIES[kind]]
    if not any(str(name).lower() == FAMILIES[kind].lower() for name in architectures):
        raise ModelError(f"{place}: architectures = {architectures} is not supported for {kind}, only {FAMILIES[kind]}")
    if quantised := given.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ModelError(
            f"{place}: quantization_config ({method}): quantised weights are not supported; "
            "take the model in bfloat16 or float32"
        )
    known = (*HONOURED, *HONOURED_BY.get(kind, ()))
    for key, value in given.items():
        if key in known or (key == "attention_bias" and kind == "qwen2"):
            continue
        if key == "layer_types" and isinstance(value, list) and set(value) == {"full_attention"}:
            continue
        if key in ONLY:
            only = ONLY[key] if key != "scoring_func" else ONLY[key][kind == "deepseek_v3" :][:1]
            if value not in only:
                raise ModelError(f"{place}: {key} = {value} is not supported, only {only[0]}; take another model")
        elif not _off(value) and not any(re.fullmatch(pattern, key) for pattern in NEUTRAL):
            raise ModelError(
                f"{place}: {key} = {str(value)[:60]} is not supported for {kind}, and may change the answers; "
                "take another model, or remove the key if it has no effect"
            )


def _off(value: Any) -> bool:
    """True if a key says that something is not there."""
    return value is None or value is False or value in ("", [], {})


def _window(place: Path, kind: str, given: Mapping[str, Any]) -> int | None:
    """The distance that a token sees back, of layers where that is limited."""
    if kind == "mistral":
        return given["sliding_window"]
    if not kind.startswith("qwen"):
        return None
    slides = [name for name in given.get("layer_types") or () if name != "full_attention"]
    if unknown := [name for name in slides if name != "sliding_attention"]:
        raise ModelError(f"{place}: layer_types has {unknown[0]}, which is not supported; take another model")
    if not given.get("use_sliding_window"):
        if slides:
            raise ModelError(
                f"{place}: layer_types has sliding_attention, but use_sliding_window is false; take another model"
            )
        return None
    if given.get("layer_types") is None and given["max_window_layers"] >= given["num_hidden_layers"]:
        return None
    return given["sliding_window"] if slides or given.get("layer_types") is None else None


def _experts(place: Path, given: Mapping[str, Any]) -> Experts | None:
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
            raise ModelError(f"{place}: {key} = {value} is not supported, only {known[0]}; take another model")
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


def _eos_ids(directory: Path, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer; `generation_config.json` knows the chat ones and wins where it exists."""
    place = directory / "generation_config.json"
    found = read_json(place).get("eos_token_id") if place.exists() else None
    if found is None:
        place, found = directory / "config.json", given.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(id, int) and id >= 0 for id in ids):
        raise ModelError(f"{place}: eos_token_id = {found} is neither a token id nor a list of them; fetch it again")
    return tuple(ids)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. Raises ModelError."""
    try:
        found = json.loads(read_bounded(path))
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); it belongs to a checkpoint directory") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the checkpoint again") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a JSON object; fetch the checkpoint again")
    return found


def read_bounded(path: Path, limit: int = _MAX_JSON_BYTES) -> bytes:
    """The content of a file. Raises ValueError when it is longer than `limit` bytes, as only broken ones are."""
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it is larger than {limit >> 20} MiB")
    return content
