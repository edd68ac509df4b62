"""Attention over paged KV for a ragged batch: each segment is a few new tokens of one sequence.

Owns the step from block lists to tensors. Decode (one token), extend and prefill chunks (many) are one path.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.blocks import BlockPool
from workers.models.config import ModelConfig


@dataclass(frozen=True)
class Segment:
    """Tokens `start..end` of a sequence, to be computed now; its KV lives in `blocks`."""

    start: int
    end: int
    blocks: List[int]


class PagedAttention:
    """Stores a batch's KV in the pool and attends over each sequence's own blocks."""

    def __init__(self, config: ModelConfig, pool: BlockPool, segments: List[Segment]) -> None:
        self._layers = pool.layers
        self._kv_heads = config.kv_heads
        device = pool.storage.device
        self._slots = [_slots(segment, pool.block_size).to(device) for segment in segments]
        self._new_slots = torch.cat([slots[s.start :] for slots, s in zip(self._slots, segments, strict=True)])
        self._lengths = [segment.end - segment.start for segment in segments]
        self._masks = [_mask(segment, device) for segment in segments]

    def attend(self, layer: int, queries: Tensor, kv: Tensor) -> Tensor:
        """See `Attention.attend`. Grouped queries share their KV head through strides, never through
        copies.
        """
        memory = self._layers[layer]
        memory.index_copy_(0, self._new_slots, kv)
        tokens, heads, head_dim = queries.shape
        kv_heads = self._kv_heads
        queries = queries.view(tokens, kv_heads, heads // kv_heads, head_dim)
        outputs = []
        for part, slots, mask in zip(queries.split(self._lengths), self._slots, self._masks, strict=True):
            keys, values = memory.index_select(0, slots).permute(1, 2, 0, 3)  # each [kv_heads, length, head_dim]
            if len(part) == 1:
                # The queries of a group take the place of query positions: all of them see all keys.
                output = F.scaled_dot_product_attention(part, keys[None], values[None])
                outputs.append(output.view(1, -1))
            else:
                shape = (kv_heads, heads // kv_heads, len(slots), head_dim)
                output = F.scaled_dot_product_attention(
                    part.permute(1, 2, 0, 3),
                    keys[:, None].expand(shape),
                    values[:, None].expand(shape),
                    attn_mask=mask,
                    is_causal=mask is None,
                )
                outputs.append(output.permute(2, 0, 1, 3).reshape(len(part), -1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _slots(segment: Segment, block_size: int) -> Tensor:
    """Where the KV of tokens `0..end` is, as indices into a layer's tokens."""
    blocks = torch.tensor(segment.blocks[: -(-segment.end // block_size)])
    return (blocks[:, None] * block_size + torch.arange(block_size)).view(-1)[: segment.end]


def _mask(segment: Segment, device: torch.device) -> Tensor | None:
    """True where a new token may look: everything up to itself. None for plain causal or a single token."""
    new = segment.end - segment.start
    if segment.start == 0 or new == 1:
        return None
    return torch.ones(new, segment.end, dtype=torch.bool, device=device).tril(segment.start)
