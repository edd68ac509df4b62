"""The decoder itself: a Llama-family transformer over a ragged batch of tokens.

Owns the arithmetic between token ids and logits. Where keys and values live, and which token sees which, is
the business of the `Attention` that the caller brings; tokens of several sequences simply stand one after
another.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.models.config import ModelConfig
from workers.models.rope import rope_table, rotate
from workers.models.weights import Weights, to_tensor

# A large weight and 2 to 64 tokens: oneDNN takes 0.5 to 0.8 of MKL's time. It compiles a kernel for each new
# number of tokens, 0.6 ms each, which small weights would not earn back.
_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_ONEDNN_FROM = 1 << 18


class Attention(Protocol):
    """Keeps the keys and values of a batch and attends over them."""

    def attend(self, layer: int, queries: Tensor, kv: Tensor) -> Tensor:
        """Stores `kv [tokens, 2, kv_heads, head_dim]`, then attends with `queries [tokens, heads, head_dim]`.

        Returns `[tokens, heads, head_dim]`.
        """
        ...


def project(inputs: Tensor, weight: Tensor) -> Tensor:
    """`inputs [tokens, in] @ weight [in, out]`, by whichever library is faster for the shape."""
    if not _ONEDNN or len(inputs) == 1 or weight.numel() < _ONEDNN_FROM or not weight.is_cpu:
        return torch.mm(inputs, weight)
    return torch.ops.mkldnn._linear_pointwise(inputs, weight.t(), None, "none", [], "")


class Layer(nn.Module):
    """Attention and SwiGLU feed-forward, each behind an RMSNorm, added to the residual stream in place."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, dtype: str) -> None:
        super().__init__()
        self.config = config
        self.index = index

        def take(name: str) -> nn.Parameter:
            return _parameter(weights[f"layers.{index}.{name}"], dtype)

        self.attn_norm, self.qkv, self.out = take("attn_norm"), take("qkv"), take("out")
        self.ffn_norm, self.gate_up, self.down = take("ffn_norm"), take("gate_up"), take("down")
        self.qkv_bias = take("qkv_bias") if config.qkv_bias else None
        self.q_norm = take("q_norm") if config.qk_norm else None
        self.k_norm = take("k_norm") if config.qk_norm else None

    def forward(self, residual: Tensor, phases: Tensor, attention: Attention) -> None:
        config = self.config
        eps = config.rms_eps
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim

        normed = F.rms_norm(residual, (config.hidden,), self.attn_norm, eps)
        qkv = project(normed, self.qkv)
        if self.qkv_bias is not None:
            qkv += self.qkv_bias
        qkv = qkv.view(-1, heads + 2 * kv_heads, head_dim)
        if self.q_norm is not None:
            qkv[:, :heads] = F.rms_norm(qkv[:, :heads], (head_dim,), self.q_norm, eps)
            keys = qkv[:, heads : heads + kv_heads]
            keys.copy_(F.rms_norm(keys, (head_dim,), self.k_norm, eps))
        rotate(qkv[:, : heads + kv_heads], phases)
        kv = qkv[:, heads:].unflatten(1, (2, kv_heads))
        residual += project(attention.attend(self.index, qkv[:, :heads], kv).flatten(1), self.out)

        normed = F.rms_norm(residual, (config.hidden,), self.ffn_norm, eps)
        gate, up = project(normed, self.gate_up).chunk(2, dim=-1)
        residual += project(F.silu(gate).mul_(up), self.down)


class Decoder(nn.Module):
    """`Decoder(ids, positions, rows, attention)`: logits after the chosen tokens of a batch."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: str = "float32") -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config, i, weights, dtype) for i in range(config.layers))
        self.norm = _parameter(weights["norm"], dtype)
        self.head = _parameter(weights["head"], dtype)
        self.embed = None if config.tied else _parameter(weights["embed"], dtype)
        self.phases: Tensor
        self.register_buffer("phases", torch.from_numpy(rope_table(config)[:, None]), persistent=False)

    def forward(self, ids: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        """Runs `ids [tokens]` at `positions [tokens]`; returns logits `[len(rows), vocab]`.

        `rows` are the indices into `ids` whose logits are wanted (None: all), so that the output head, a
        fifth of a small model's work, runs only where a token will be sampled.
        """
        residual = F.embedding(ids, self.head.t() if self.embed is None else self.embed)
        phases = self.phases[positions]
        for layer in self.layers:
            layer(residual, phases, attention)
        if rows is not None:
            residual = residual[rows]
        return project(F.rms_norm(residual, (self.config.hidden,), self.norm, self.config.rms_eps), self.head)


def _parameter(array: np.ndarray, dtype: str) -> nn.Parameter:
    return nn.Parameter(to_tensor(array, dtype), requires_grad=False)
