"""The decoder: a transformer over a ragged batch of tokens, Llama-family or DeepSeek-style, perhaps with experts.

Owns the arithmetic between token ids and logits. Where keys and values live, and which token sees which, is the
business of the `Attention` that the caller brings; tokens of several sequences stand one after another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.models.attention import Attention, GroupedHeads, LatentHeads, project
from workers.models.config import Experts, ModelConfig
from workers.models.rope import rope_table
from workers.models.weights import Weights, to_parameter


class RoutedExperts(nn.Module):
    """The routed experts of one layer, as DeepSeek-V2 and V3 have them; the shared ones are a feed-forward beside them.

    Of each token the router's best experts count; V3 adds a learned bias to the choice, not to the weight. Groups of
    experts, where there are some, are chosen first.
    """

    def __init__(self, config: ModelConfig, index: int, weights: Weights, dtype: str) -> None:
        super().__init__()
        assert config.experts is not None
        self.experts = config.experts
        names = f"layers.{index}."
        self.router = to_parameter(weights[names + "router"], "float32")  # its choice is all or nothing
        bias = weights.get(names + "router_bias")
        self.router_bias = None if bias is None else to_parameter(bias, "float32")
        self.gate_up = to_parameter(weights[names + "experts_gate_up"], dtype)
        self.down = to_parameter(weights[names + "experts_down"], dtype)

    def forward(self, normed: Tensor) -> Tensor:
        """`normed [tokens, hidden]` through each token's experts, weighted: `[tokens, hidden]`."""
        chosen, shares = route(normed.float() @ self.router, self.router_bias, self.experts)
        shares = shares.to(normed.dtype)
        total = torch.zeros_like(normed)
        for expert in chosen.unique().tolist():
            tokens, place = torch.where(chosen == expert)
            gate, up = project(normed[tokens], self.gate_up[expert]).chunk(2, dim=-1)
            output = project(F.silu(gate).mul_(up), self.down[expert])
            total.index_add_(0, tokens, output * shares[tokens, place, None])
        return total


def route(logits: Tensor, bias: Tensor | None, experts: Experts) -> tuple[Tensor, Tensor]:
    """(experts, their shares), both `[tokens, active]`, from the router's `logits [tokens, count]`."""
    scores = logits.sigmoid() if experts.sigmoid else logits.softmax(dim=-1)
    candidates = scores if bias is None else scores + bias
    if experts.groups > 1:
        grouped = candidates.unflatten(-1, (experts.groups, -1))
        # V3 judges a group by its two best, V2 by its best
        worth = grouped.topk(2, dim=-1)[0].sum(dim=-1) if experts.sigmoid else grouped.amax(dim=-1)
        kept = torch.zeros_like(worth, dtype=torch.bool)
        kept.scatter_(1, worth.topk(experts.groups_kept, dim=-1)[1], True)
        candidates = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    chosen = candidates.topk(experts.active, dim=-1)[1]
    shares = scores.gather(1, chosen)
    if experts.normalised:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen, shares * experts.scale


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
