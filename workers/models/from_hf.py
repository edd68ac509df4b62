"""Hugging Face checkpoint directories as models: names and layouts of their tensors. Owns no format.

Query and key rows are brought from halves into pairs (see `rope.py`); q, k, v and gate, up are fused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from workers.models.assemble import Names, assemble
from workers.models.checkpoint import Checkpoint, read_json
from workers.models.config import ModelConfig
from workers.models.hf_config import hf_config
from workers.models.hf_tokenizer import hf_tokenizer
from workers.models.text import TextTokenizer

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


_NEUTRAL = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
"""Tensors that may be left out: tables that old checkpoints kept."""


def load_hf(directory: Path) -> tuple[ModelConfig, dict[str, np.ndarray], TextTokenizer]:
    """Configuration, fused float32 weights and tokenizer of a checkpoint directory. Raises ModelError."""
    given = read_json(directory / "config.json")
    config = hf_config(directory, given)
    # DeepSeek's own code rotates neighbours; V3 checkpoints that were converted say so.
    paired = config.latent is not None and (given["model_type"] != "deepseek_v3" or given.get("rope_interleave", True))
    checkpoint = Checkpoint(directory)
    names, neutral = _NAMES, list(_NEUTRAL)
    if config.tied and f"{names.head}.weight" in checkpoint:
        config, names = _untie(config, checkpoint)
    for extra in range(given.get("num_nextn_predict_layers", given.get("num_mtp_layers", 0)) or 0):
        neutral.append(rf"model\.layers\.{config.layers + extra}\..*")  # guesses further tokens, which we do not
    weights = assemble(config, names, checkpoint.read, paired)
    checkpoint.check_all_used(neutral)
    return config, weights, hf_tokenizer(directory, config)


def _untie(config: ModelConfig, checkpoint: Checkpoint) -> tuple[ModelConfig, Names]:
    """What a head in the checkpoint of a tied model means, as transformers has it: the one matrix, where the
    embedding is the same or missing, and otherwise that the configuration is wrong.
    """
    if f"{_NAMES.embed}.weight" not in checkpoint:
        return config, replace(_NAMES, embed=_NAMES.head)
    head, embed = (checkpoint.read(f"{name}.weight") for name in (_NAMES.head, _NAMES.embed))
    return replace(config, tied=np.array_equal(head, embed)), _NAMES
