"""Attention between the residual stream and the KV memory: projections, norms, rotation; grouped heads and DeepSeek's
latent ones.

Owns no memory: where keys and values live, and which token sees which, is the business of the `Attention` that the
caller brings.
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
        """The share of attention in the residual of `normed [tokens, hidden]`, `[tokens, hidden]`."""
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


_NORM_EPS = 1e-6  # DeepSeek's code, whatever the configuration says for the other norms


class LatentHeads(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) over the *latent* cache.

    Of each token only the normalised latent and one rotated key, which all heads share, are kept: `kv_rank + rope_dim`
    numbers a layer. The heads' own keys and values are never made. Instead each head's query is brought into the
    latent space (`k_up`), attends there as if all heads shared one KV head, and the result is brought back (`v_up`):
    the same sums in another order. The rotated key's share of the attended "values" is thrown away; leaving it out
    would cost the fused kernel, which wants keys and values of one width.
    """

    def __init__(self, config: ModelConfig, index: int, weights: Weights, dtype: str) -> None:
        super().__init__()
        assert config.latent is not None
        self.latent = config.latent
        self.heads = config.heads
        self.index = index

        def take(name: str) -> nn.Parameter:
            return to_parameter(weights[f"layers.{index}.{name}"], dtype)

        self.first, self.kv_norm = take("first"), take("kv_norm")
        self.k_up, self.v_up, self.out = take("k_up"), take("v_up"), take("out")
        self.q_norm = take("q_norm") if self.latent.query_rank else None
        self.q_up = take("q_up") if self.latent.query_rank else None

    def forward(self, normed: Tensor, phases: Tensor, attention: Attention) -> Tensor:
        """The share of attention in the residual of `normed [tokens, hidden]`, `[tokens, hidden]`."""
        latent = self.latent
        widths = (latent.query_width(self.heads), latent.kv_rank, latent.rope_dim)
        queries, latents, shared_key = project(normed, self.first).split(widths, dim=-1)
        if self.q_up is not None:
            queries = project(F.rms_norm(queries, (widths[0],), self.q_norm, _NORM_EPS), self.q_up)
        queries = queries.unflatten(-1, (self.heads, -1))
        plain, turned = queries.split((latent.nope_dim, latent.rope_dim), dim=-1)

        rotated = torch.cat((turned, shared_key[:, None]), dim=1)
        rotate(rotated, phases)
        into_latent = torch.bmm(plain.transpose(0, 1), self.k_up).transpose(0, 1)  # [tokens, heads, kv_rank]
        kv = torch.cat((F.rms_norm(latents, (latent.kv_rank,), self.kv_norm, _NORM_EPS), rotated[:, -1]), dim=-1)
        attended = attention.attend(self.index, torch.cat((into_latent, rotated[:, :-1]), dim=-1), kv)
        values = torch.bmm(attended[..., : latent.kv_rank].transpose(0, 1), self.v_up)  # [heads, tokens, value_dim]
        return project(values.transpose(0, 1).flatten(1), self.out)
