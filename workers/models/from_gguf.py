"""GGUF files as models: names and layouts of llama.cpp's llama, qwen2 and qwen3 architectures. Owns no
format.

In the llama architecture llama.cpp stores query and key rows as neighbouring pairs, which is our layout; the
Qwen architectures keep Hugging Face's halves and are interleaved here.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from workers.models.assemble import Names, assemble
from workers.models.bpe import bpe_tokenizer, pre_tokenizer
from workers.models.config import ModelConfig, ModelError
from workers.models.gguf_file import GgufFile
from workers.models.text import TextTokenizer

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
_CONTROL, _USER_DEFINED = 3, 4


def load_gguf(path: Path) -> tuple[ModelConfig, dict[str, np.ndarray], TextTokenizer]:
    """Configuration, fused float32 weights and tokenizer of a `.gguf` file. Raises ModelError."""
    file = GgufFile(path)
    config = gguf_config(file)
    return config, assemble(config, _NAMES, file.tensor, _PAIRED[file.architecture]), gguf_tokenizer(file, config)


def gguf_config(file: GgufFile) -> ModelConfig:
    """The configuration in a file's metadata; refuses what the decoder does not compute."""
    if file.architecture not in _PAIRED:
        raise ModelError(
            f'{file.path}: architecture "{file.architecture}" is not supported; take one of {", ".join(_PAIRED)}'
        )
    hidden, heads = file.get("embedding_length"), file.get("attention.head_count")
    head_dim = file.get("attention.key_length", hidden // heads)
    unsupported = [
        reason
        for reason, found in {
            "mixture of experts": file.get("expert_count", 0) > 0,
            "partial rotary embedding": file.get("rope.dimension_count", head_dim) != head_dim,
            f'rope scaling "{file.get("rope.scaling.type", "none")}"': file.get("rope.scaling.type", "none")
            not in ("none", "linear"),
        }.items()
        if found
    ]
    if unsupported:
        raise ModelError(f"{file.path}: {' and '.join(unsupported)} not supported; take a plain decoder")
    factors = None
    if "rope_freqs.weight" in file:
        factors = tuple(file.tensor("rope_freqs.weight").tolist())
    elif file.get("rope.scaling.type", "none") == "linear":
        factors = (file.get("rope.scaling.factor"),) * (head_dim // 2)
    tokenizer = {key: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "eom")}
    return ModelConfig(
        name=file.path.stem,
        layers=file.get("block_count"),
        hidden=hidden,
        intermediate=file.get("feed_forward_length"),
        heads=heads,
        kv_heads=file.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=len(file.metadata.get("tokenizer.ggml.tokens", ())),
        context_length=min(file.get("context_length"), file.get("attention.sliding_window", 0) or math.inf),
        rope_theta=file.get("rope.freq_base", 10_000.0),
        rope_factors=factors,
        rms_eps=file.get("attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in file,
        qkv_bias="blk.0.attn_q.bias" in file,
        qk_norm="blk.0.attn_q_norm.weight" in file,
        bos_id=tokenizer["bos"],
        eos_ids=tuple(id for key in ("eos", "eot", "eom") if (id := tokenizer[key]) is not None),
    )


def gguf_tokenizer(file: GgufFile, config: ModelConfig) -> TextTokenizer:
    """The tokenizer and chat template in a file's metadata. Byte-level BPE ("gpt2") only."""
    source, about = str(file.path), file.metadata
    if (kind := about.get("tokenizer.ggml.model")) != "gpt2":
        raise ModelError(
            f'{source}: tokenizer "{kind}" is not supported in GGUF; use the Hugging Face directory of the model'
        )
    tokens = about.get("tokenizer.ggml.tokens", [])
    types = zip(tokens, about.get("tokenizer.ggml.token_type", []), strict=False)
    added = {token: kind == _CONTROL for token, kind in types if kind in (_CONTROL, _USER_DEFINED)}
    pre = pre_tokenizer(about.get("tokenizer.ggml.pre", "default"), source)
    return TextTokenizer(
        bpe_tokenizer(tokens, about.get("tokenizer.ggml.merges", []), added, pre, source),
        eos_ids=config.eos_ids,
        bos_id=config.bos_id,
        add_bos=about.get("tokenizer.ggml.add_bos_token", False),
        chat_template=about.get("tokenizer.chat_template"),
    )
