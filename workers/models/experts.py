"""A layer's mixture of experts, as DeepSeek-V2 and V3 have it: a router, routed experts, and shared ones for all.

Owns no attention and no residual. Of each token the router's best experts count; V3 adds a learned bias to the choice,
not to the weight. Groups of experts, where there are some, are chosen first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.models.attention import project
from workers.models.config import Experts, ModelConfig
from workers.models.weights import Weights, to_parameter


class RoutedExperts(nn.Module):
    """What the routed experts of one layer add; the shared ones are an ordinary feed-forward beside it."""

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
