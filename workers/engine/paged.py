"""Attention over paged KV for a ragged batch: each segment is a few new tokens of one sequence.

Owns the step from block lists to tensors. Segments of few tokens (decode, speculation, short extends) are attended
together, padded to the longest of a group; long ones (prefill chunks) one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.blocks import BlockPool
from workers.models.config import ModelConfig

FEW = 16
"""Segments of at most so many tokens are attended in groups."""
GROUP_BYTES = {"cpu": 1 << 20, "cuda": 1 << 28}
"""KV that a group copies out of the pool, per layer: on a CPU what its cache still holds when attention reads it."""


@dataclass(frozen=True)
class Segment:
    """Tokens `start..end` of a sequence, to be computed now; its KV lives in `blocks`."""

    start: int
    end: int
    blocks: List[int]

    @property
    def new(self) -> int:
        return self.end - self.start


class PagedAttention:
    """Stores a batch's KV in the pool and attends over each sequence's own blocks."""

    def __init__(self, config: ModelConfig, pool: BlockPool, segments: List[Segment]) -> None:
        device = pool.storage.device
        self._layers = pool.layers
        new_slots = [slot for segment in segments for slot in _new_slots(segment, pool.block_size)]
        self._new_slots = torch.tensor(new_slots, device=device)
        bytes_per_token = pool.bytes_per_token // config.layers
        groups = group(segments, GROUP_BYTES[device.type] // bytes_per_token)
        self._parts = [_part([segments[i] for i in members], config, pool) for members in groups]
        self._sizes = [sum(segments[i].new for i in members) for members in groups]
        self._order, self._back = _reordering(segments, groups, device)

    def attend(self, layer: int, queries: Tensor, kv: Tensor) -> Tensor:
        """See `Attention.attend`."""
        memory = self._layers[layer]
        memory.index_copy_(0, self._new_slots, kv)
        if self._order is not None:
            queries = queries.index_select(0, self._order)
        outputs = [part.attend(memory, few) for part, few in zip(self._parts, queries.split(self._sizes), strict=True)]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output if self._back is None else output.index_select(0, self._back)


class _Together:
    """Segments of the same few new tokens. Queries that share a KV head, and those of all new tokens, stand side by
    side in place of query positions, so that keys and values are read once.
    """

    def __init__(self, segments: List[Segment], config: ModelConfig, pool: BlockPool) -> None:
        device = pool.storage.device
        self._count, self._new = len(segments), segments[0].new
        self._kv_heads, self._scale = config.kv_heads, config.scale
        self._length = max(segment.end for segment in segments)
        slots = _padded_slots(segments, self._length, pool.block_size)
        self._slots = slots.view(-1).to(device)
        self._visible: Tensor | None = None
        if self._new > 1 or any(segment.end != self._length for segment in segments):
            ends = torch.tensor([range(s.start + 1, s.end + 1) for s in segments])  # what each new token sees
            visible = torch.arange(self._length) < ends[..., None]
            self._visible = visible[:, None, :, None].to(device)  # [count, 1, new, 1, length]
        self._bias: Tensor | None = None

    def attend(self, memory: Tensor, queries: Tensor) -> Tensor:
        tokens, heads, head_dim = queries.shape
        shape = (self._count, self._new, self._kv_heads, heads // self._kv_heads, head_dim)
        queries = queries.view(shape).transpose(1, 2)  # [count, kv_heads, new, heads a KV head, head_dim]
        keys, values = _keys_and_values(memory.index_select(0, self._slots), self._count, self._kv_heads)
        if self._visible is not None and self._bias is None:  # once for all layers
            bias = torch.zeros(self._visible.shape, dtype=queries.dtype, device=queries.device)
            bias.masked_fill_(~self._visible, float("-inf"))
            self._bias = bias.expand(-1, -1, -1, shape[3], -1).flatten(2, 3)
        output = F.scaled_dot_product_attention(
            queries.flatten(2, 3), keys, values, attn_mask=self._bias, scale=self._scale
        )
        return output.unflatten(2, (self._new, -1)).transpose(1, 2).reshape(tokens, heads, head_dim)


class _Alone:
    """One segment of many new tokens. Grouped queries share their KV head through strides, never through copies."""

    def __init__(self, segment: Segment, config: ModelConfig, pool: BlockPool) -> None:
        device = pool.storage.device
        self._kv_heads, self._scale = config.kv_heads, config.scale
        self._slots = _padded_slots([segment], segment.end, pool.block_size)[0].to(device)
        self._mask: Tensor | None = None  # plain causal
        if segment.start > 0:
            mask = torch.ones(segment.new, segment.end, dtype=torch.bool, device=device)
            self._mask = mask.tril(segment.start)  # a new token sees everything up to itself

    def attend(self, memory: Tensor, queries: Tensor) -> Tensor:
        tokens, heads, head_dim = queries.shape
        keys, values = _keys_and_values(memory.index_select(0, self._slots), 1, self._kv_heads)
        shape = (self._kv_heads, heads // self._kv_heads, len(self._slots), head_dim)
        output = F.scaled_dot_product_attention(
            queries.view(tokens, *shape[:2], head_dim).permute(1, 2, 0, 3),
            keys[0, :, None].expand(shape),
            values[0, :, None].expand(shape),
            attn_mask=self._mask,
            is_causal=self._mask is None,
            scale=self._scale,
        )
        return output.permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)


def group(segments: List[Segment], max_tokens: int) -> list[list[int]]:
    """The segments to attend together, by index: equally many new tokens, similar lengths.

    A group is padded to its longest member: none to more than 1.5 times its length and 64. A group of several has at
    most `max_tokens` in all, padding included.
    """
    groups: list[list[int]] = []
    size, longest, new = 0, 0, 0
    for index in sorted(range(len(segments)), key=lambda i: (segments[i].new, -segments[i].end)):
        segment = segments[index]
        fits = segment.new == new <= FEW and longest <= 1.5 * segment.end + 64 and (size + 1) * longest <= max_tokens
        if fits:
            groups[-1].append(index)
            size += 1
        else:
            groups.append([index])
            size, longest, new = 1, segment.end, segment.new
    return groups


def _part(segments: List[Segment], config: ModelConfig, pool: BlockPool) -> _Together | _Alone:
    if segments[0].new > FEW:
        return _Alone(segments[0], config, pool)
    return _Together(segments, config, pool)


def _keys_and_values(kv: Tensor, count: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Views `[count, kv_heads, length, head_dim]` on `kv [count * length, 2, kv_heads, head_dim]`.

    Of latents, `[count * length, head_dim]`, keys and values are one and the same.
    """
    if kv.ndim == 2:
        latents = kv.view(count, 1, -1, kv.shape[-1])
        return latents, latents
    keys, values = kv.view(count, -1, 2, kv_heads, kv.shape[-1]).permute(2, 0, 3, 1, 4)
    return keys, values


def _padded_slots(segments: List[Segment], length: int, block_size: int) -> Tensor:
    """The places of the KV of each segment's tokens `0..end` is, as indices into a layer's tokens `[segments, length]`.

    Behind its end each repeats its first token: the memory there may hold anything, and not-a-number times a weight
    of zero would be not-a-number.
    """
    width = -(-length // block_size)
    rows = [list(s.blocks[: -(-s.end // block_size)]) for s in segments]
    blocks = torch.tensor([row + row[:1] * (width - len(row)) for row in rows])
    slots = (blocks[:, :, None] * block_size + torch.arange(block_size)).flatten(1)[:, :length]
    ends = torch.tensor([[segment.end] for segment in segments])
    return torch.where(torch.arange(length) < ends, slots, slots[:, :1])


def _new_slots(segment: Segment, block_size: int) -> Iterable[int]:
    for position in range(segment.start, segment.end):
        yield segment.blocks[position // block_size] * block_size + position % block_size


def _reordering(
    segments: List[Segment], groups: list[list[int]], device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Indices that bring a batch's tokens into the order of its groups, and back; None when that is theirs already."""
    members = [index for indices in groups for index in indices]
    if members == list(range(len(segments))):
        return None, None
    starts = [0]
    for segment in segments:
        starts.append(starts[-1] + segment.new)
    order = torch.tensor([row for index in members for row in range(starts[index], starts[index + 1])])
    return order.to(device), order.argsort().to(device)
