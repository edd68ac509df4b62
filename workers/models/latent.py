"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) over the *latent* cache.

Of each token only the normalised latent and one rotated key, which all heads share, are kept: `kv_rank + rope_dim`
numbers a layer. The heads' own keys and values are never made. Instead each head's query is brought into the latent
space (`k_up`), attends there as if all heads shared one KV head, and the result is brought back (`v_up`): the same
sums in another order. The rotated key's share of the attended "values" is thrown away; leaving it out would cost the
fused kernel, which wants keys and values of one width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.models.attention import Attention, project
from workers.models.config import ModelConfig
from workers.models.rope import rotate
from workers.models.weights import Weights, to_parameter

_NORM_EPS = 1e-6  # DeepSeek's code, whatever the configuration says for the other norms


class LatentHeads(nn.Module):
    """Attention of one layer whose configuration has a `latent`."""

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
        """What `normed [tokens, hidden]` gains from attention, `[tokens, hidden]`."""
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
