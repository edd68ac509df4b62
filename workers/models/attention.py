"""Attention between the residual stream and the KV memory: projections, norms and rotation of grouped heads.

Owns no memory: where keys and values live, and which token sees which, is the business of the `Attention` that the
caller brings. DeepSeek's latent attention is in `latent.py`.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.models.config import ModelConfig
from workers.models.rope import rotate
from workers.models.weights import Weights, to_parameter

# A large weight and 2 to 64 tokens: oneDNN takes 0.5 to 0.8 of MKL's time. It compiles a kernel for each new
# number of tokens, 0.6 ms each, which small weights would not earn back. For one token MKL takes 0.75 of its time, and
# is not used: a token that is decoded must round as it does when it is extended, or its KV may differ by 1e-5.
_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_ONEDNN_FROM = 1 << 18


class Attention(Protocol):
    """Keeps the keys and values of a batch and attends over them."""

    def attend(self, layer: int, queries: Tensor, kv: Tensor) -> Tensor:
        """Stores `kv [tokens, *kv_shape of a layer]`, then attends with `queries [tokens, heads, head_dim]`.

        Returns `[tokens, heads, head_dim]`.
        """
        ...


def project(inputs: Tensor, weight: Tensor) -> Tensor:
    """`inputs [tokens, in] @ weight [in, out]`, by whichever library is faster for the shape."""
    if not _ONEDNN or weight.numel() < _ONEDNN_FROM or not weight.is_cpu:
        return torch.mm(inputs, weight)
    return torch.ops.mkldnn._linear_pointwise(inputs, weight.t(), None, "none", [], "")


class GroupedHeads(nn.Module):
    """Grouped-query attention of the Llama family: one fused projection, rotary queries and keys."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights, dtype: str) -> None:
        super().__init__()
        self.config = config
        self.index = index

        def take(name: str) -> nn.Parameter:
            return to_parameter(weights[f"layers.{index}.{name}"], dtype)

        self.qkv, self.out = take("qkv"), take("out")
        self.qkv_bias = take("qkv_bias") if config.qkv_bias else None
        self.q_norm = take("q_norm") if config.qk_norm else None
        self.k_norm = take("k_norm") if config.qk_norm else None

    def forward(self, normed: Tensor, phases: Tensor, attention: Attention) -> Tensor:
        """What `normed [tokens, hidden]` gains from attention, `[tokens, hidden]`."""
        config = self.config
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        qkv = project(normed, self.qkv)
        if self.qkv_bias is not None:
            qkv += self.qkv_bias
        qkv = qkv.view(-1, heads + 2 * kv_heads, head_dim)
        if self.q_norm is not None:
            qkv[:, :heads] = F.rms_norm(qkv[:, :heads], (head_dim,), self.q_norm, config.rms_eps)
            keys = qkv[:, heads : heads + kv_heads]
            keys.copy_(F.rms_norm(keys, (head_dim,), self.k_norm, config.rms_eps))
        rotate(qkv[:, : heads + kv_heads], phases)
        kv = qkv[:, heads:].unflatten(1, (2, kv_heads))
        return project(attention.attend(self.index, qkv[:, :heads], kv).flatten(1), self.out)
