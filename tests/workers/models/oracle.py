"""transformers as the oracle: the same weights in its model, and our logits for all tokens of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from workers.engine import BlockPool
from workers.engine.paged import PagedAttention, Segment
from workers.models import LoadedModel, ModelConfig


@torch.inference_mode()
def our_logits(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    """Logits after every token, `[tokens, vocab]`."""
    pool = BlockPool(loaded.config, -(-len(ids) // 16), dtype=loaded.spec.dtype)
    segment = Segment(0, len(ids), range(pool.num_blocks))
    attention = PagedAttention(loaded.config, pool, [segment])
    logits: torch.Tensor = loaded.model(torch.tensor(ids), torch.arange(len(ids)), None, attention)
    return logits


@torch.inference_mode()
def their_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Logits after every token, `[tokens, vocab]`."""
    logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def llama_shape(config: ModelConfig, **more: Any) -> LlamaConfig:
    """A Llama of the same size for transformers; `more` is what else matters to the comparison."""
    return LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        **more,
    )


def llama_from_gguf(path: Path, config: ModelConfig) -> LlamaForCausalLM:
    """transformers' own reading of a GGUF file: its reader, its permutation, its names.

    `from_pretrained(gguf_file=...)` would need accelerate and 15 s; this is what it does inside.
    """
    shape = llama_shape(
        config,
        max_position_embeddings=config.context_length,
        rms_norm_eps=config.rms_eps,
        rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"},
        tie_word_embeddings=config.tied,
        pad_token_id=0,
        eos_token_id=list(config.eos_ids),
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(shape).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(shape)
    return model
