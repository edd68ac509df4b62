"""Checkpoints of every supported family, small and random, as directories and as GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "eos_token_id": 7,
    "bos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
DEEPSEEK_YARN = YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.0}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "first_k_dense_replace": 3,  # all layers
}
EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": False,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama, tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama, one KV head": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 1}),
    "llama, no grouping": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4}),
    "llama, wide heads": (LlamaConfig, LlamaForCausalLM, {"head_dim": 32}),
    "llama 3 rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR_ROPE}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "qwen3, yarn": (Qwen3Config, Qwen3ForCausalLM, {"rope_parameters": YARN_ROPE}),
    "deepseek v2": (DeepseekV2Config, DeepseekV2ForCausalLM, LATENT),
    "deepseek v2, yarn": (DeepseekV2Config, DeepseekV2ForCausalLM, LATENT | {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek v2, plain queries": (DeepseekV2Config, DeepseekV2ForCausalLM, LATENT | {"q_lora_rank": None}),
    "deepseek v3": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT),
    "deepseek v3, yarn": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT | {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek v3, halves": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT | {"rope_interleave": False}),
    "deepseek v2, experts": (DeepseekV2Config, DeepseekV2ForCausalLM, LATENT | EXPERTS),
    "deepseek v2, experts in groups": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        LATENT | EXPERTS | {"topk_method": "group_limited_greedy"},
    ),
    "deepseek v3, experts": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT | EXPERTS | {"norm_topk_prob": True}),
    "deepseek v3, experts, raw shares": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT | EXPERTS),
    "deepseek v3, halves, plain queries": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        LATENT | {"rope_interleave": False, "q_lora_rank": None},
    ),
}

IDS = np.random.default_rng(0).integers(0, 256, 100).tolist()


def random_model(family: str, **more: Any) -> PreTrainedModel:
    config, model, options = FAMILIES[family]
    torch.manual_seed(0)
    oracle: PreTrainedModel = model(config(**SHAPE | options | more)).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():  # norms and biases start as ones and zeros
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, buffer in oracle.named_buffers():  # the bias of a router's choice is none of the parameters
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    return oracle


def save(oracle: PreTrainedModel, directory: Path) -> Path:
    oracle.save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(tokenizer_models.BPE({character: id for id, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def write_gguf(
    oracle: PreTrainedModel,
    path: Path,
    kind: str = "F32",
    merges: list[str] | None = None,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    split: int = 0,
) -> Path:
    """What llama.cpp's converter would write: its names, and for the llama architecture its row order.

    `keys` and `tensors` are written besides, or instead; a key that is None is left out, and one that begins with a dot
    is the architecture's.
    """
    config = oracle.config
    state = {name: tensor.numpy() for name, tensor in oracle.state_dict().items()}
    arch = config.model_type if config.model_type != "mistral" else "llama"
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if "qwen" in arch else "gpt-2")
    writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet())[:255], "ab"])
    writer.add_token_types([1] * 256)
    writer.add_token_merges(merges or ["a b"])
    writer.add_eos_token_id(7)
    for key, value in (keys or {}).items():
        key = arch + key if key.startswith(".") else key
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    quantised = gguf.GGMLQuantizationType[kind]
    for name, tensor in state.items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = tensor.reshape(-1, 2, head_dim // 2, tensor.shape[-1]).swapaxes(1, 2).reshape(tensor.shape)
        if tensor.ndim == 2 and kind != "F32":
            writer.add_tensor(target, gguf.quants.quantize(tensor, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(target, tensor.copy())
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
