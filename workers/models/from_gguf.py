"""GGUF files as models: names and layouts of llama.cpp's llama, qwen2 and qwen3 architectures. Owns no
format.

In the llama architecture llama.cpp stores query and key rows as neighbouring pairs, which is our layout; the
Qwen architectures keep Hugging Face's halves and are interleaved here.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from workers.models.bpe import bpe_tokenizer, pre_tokenizer
from workers.models.config import ModelConfig, ModelError
from workers.models.gguf_file import GgufFile
from workers.models.rope import interleave
from workers.models.text import TextTokenizer

_PAIRED = {"llama": True, "qwen2": False, "qwen3": False}
_CONTROL, _USER_DEFINED = 3, 4


def load_gguf(path: Path) -> tuple[ModelConfig, dict[str, np.ndarray], TextTokenizer]:
    """Configuration, fused float32 weights and tokenizer of a `.gguf` file. Raises ModelError."""
    file = GgufFile(path)
    config = gguf_config(file)
    return config, _weights(file, config), gguf_tokenizer(file, config)


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
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f'{file.path}: tokenizer "{kind}" is not supported in GGUF; use the Hugging Face directory of the model'
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", [])
    special = {
        token: kind == _CONTROL for token, kind in zip(tokens, types, strict=False) if kind in (_CONTROL, _USER_DEFINED)
    }
    return TextTokenizer(
        bpe_tokenizer(
            tokens,
            metadata.get("tokenizer.ggml.merges", []),
            special,
            pre_tokenizer(metadata.get("tokenizer.ggml.pre", "default"), str(file.path)),
        ),
        eos_ids=config.eos_ids,
        bos_id=config.bos_id,
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", False),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _weights(file: GgufFile, config: ModelConfig) -> dict[str, np.ndarray]:
    paired = _PAIRED[file.architecture]

    def rotated(name: str) -> np.ndarray:
        rows = file.tensor(name)
        return rows if paired else interleave(rows, config.head_dim)

    weights = {"embed": file.tensor("token_embd.weight"), "norm": file.tensor("output_norm.weight")}
    if not config.tied:
        weights["head"] = file.tensor("output.weight")
    for index in range(config.layers):
        theirs, ours = f"blk.{index}.", f"layers.{index}."
        for name, source in (
            ("attn_norm", "attn_norm.weight"),
            ("out", "attn_output.weight"),
            ("ffn_norm", "ffn_norm.weight"),
            ("down", "ffn_down.weight"),
        ):
            weights[ours + name] = file.tensor(theirs + source)
        for name, kind in (("qkv", "weight"), ("qkv_bias", "bias"))[: 1 + config.qkv_bias]:
            weights[ours + name] = np.concatenate(
                [
                    rotated(f"{theirs}attn_q.{kind}"),
                    rotated(f"{theirs}attn_k.{kind}"),
                    file.tensor(f"{theirs}attn_v.{kind}"),
                ]
            )
        for name in ("q_norm", "k_norm")[: 2 * config.qk_norm]:
            weights[ours + name] = rotated(f"{theirs}attn_{name}.weight")
        weights[ours + "gate_up"] = np.concatenate(
            [file.tensor(theirs + "ffn_gate.weight"), file.tensor(theirs + "ffn_up.weight")]
        )
    return weights
