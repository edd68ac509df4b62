"""The decoder itself: a transformer over a ragged batch of tokens, Llama-family or DeepSeek-style.

Owns the arithmetic between token ids and logits. Where keys and values live, and which token sees which, is
the business of the `Attention` that the caller brings; tokens of several sequences simply stand one after
another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.models.attention import Attention, GroupedHeads, project
from workers.models.config import ModelConfig
from workers.models.experts import RoutedExperts
from workers.models.latent import LatentHeads
from workers.models.rope import rope_table
from workers.models.weights import Weights, to_parameter


class Layer(nn.Module):
    """Attention and SwiGLU feed-forward, perhaps with experts, each behind an RMSNorm, added to the residual stream in
    place.
    """

    def __init__(self, config: ModelConfig, index: int, weights: Weights, dtype: str) -> None:
        super().__init__()
        self.config = config

        def take(name: str) -> nn.Parameter:
            return to_parameter(weights[f"layers.{index}.{name}"], dtype)

        self.attn_norm, self.ffn_norm = take("attn_norm"), take("ffn_norm")
        self.gate_up, self.down = take("gate_up"), take("down")
        self.experts = RoutedExperts(config, index, weights, dtype) if config.mixed(index) else None
        self.heads = (LatentHeads if config.latent else GroupedHeads)(config, index, weights, dtype)

    def forward(self, residual: Tensor, phases: Tensor, attention: Attention) -> None:
        shape, eps = (self.config.hidden,), self.config.rms_eps
        residual += self.heads(F.rms_norm(residual, shape, self.attn_norm, eps), phases, attention)
        normed = F.rms_norm(residual, shape, self.ffn_norm, eps)
        gate, up = project(normed, self.gate_up).chunk(2, dim=-1)
        residual += project(F.silu(gate).mul_(up), self.down)
        if self.experts is not None:
            residual += self.experts(normed)


class Decoder(nn.Module):
    """`Decoder(ids, positions, rows, attention)`: logits after the chosen tokens of a batch."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: str = "float32") -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config, i, weights, dtype) for i in range(config.layers))
        self.norm = to_parameter(weights["norm"], dtype)
        self.head = to_parameter(weights["head"], dtype)
        self.embed = None if config.tied else to_parameter(weights["embed"], dtype)
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
        normed = F.rms_norm(residual, (self.config.hidden,), self.norm, self.config.rms_eps)
        # of one token twice as fast; no KV depends on its rounding
        return torch.mm(normed, self.head) if len(normed) == 1 else project(normed, self.head)
