"""From a checkpoint's tensors to our weights: one walk for every format, which differ in names and pair
layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from workers.models.config import ModelConfig
from workers.models.rope import interleave


@dataclass(frozen=True)
class Names:
    """What a format calls its tensors, without `.weight` and `.bias`; `layer` takes the layer's index."""

    embed: str
    head: str
    norm: str
    layer: str
    attn_norm: str
    q: str
    k: str
    v: str
    q_norm: str
    k_norm: str
    out: str
    ffn_norm: str
    gate: str
    up: str
    down: str


def assemble(
    config: ModelConfig, names: Names, read: Callable[[str], np.ndarray], paired: bool
) -> dict[str, np.ndarray]:
    """Weights as `weights.py` names them, from `read(tensor name)`: float32, matrices `[outputs, inputs]`.

    `paired` says that the rotated rows of q and k already are in our pair layout.
    """

    def rotated(name: str) -> np.ndarray:
        rows = read(name)
        return rows if paired else interleave(rows, config.head_dim)

    weights = {"norm": read(f"{names.norm}.weight")}
    if config.tied:
        weights["head"] = fuse(read(f"{names.embed}.weight"))
    else:
        weights["head"] = fuse(read(f"{names.head}.weight"))
        weights["embed"] = read(f"{names.embed}.weight")
    for index in range(config.layers):
        theirs, ours = names.layer.format(index), f"layers.{index}."
        q, k, v = theirs + names.q, theirs + names.k, theirs + names.v
        weights[ours + "attn_norm"] = read(f"{theirs}{names.attn_norm}.weight")
        weights[ours + "qkv"] = fuse(rotated(f"{q}.weight"), rotated(f"{k}.weight"), read(f"{v}.weight"))
        if config.qkv_bias:
            biases = [rotated(f"{q}.bias"), rotated(f"{k}.bias"), read(f"{v}.bias")]
            weights[ours + "qkv_bias"] = np.concatenate(biases)
        if config.qk_norm:
            weights[ours + "q_norm"] = rotated(f"{theirs}{names.q_norm}.weight")
            weights[ours + "k_norm"] = rotated(f"{theirs}{names.k_norm}.weight")
        weights[ours + "out"] = fuse(read(f"{theirs}{names.out}.weight"))
        weights[ours + "ffn_norm"] = read(f"{theirs}{names.ffn_norm}.weight")
        gate, up = read(f"{theirs}{names.gate}.weight"), read(f"{theirs}{names.up}.weight")
        weights[ours + "gate_up"] = fuse(gate, up)
        weights[ours + "down"] = fuse(read(f"{theirs}{names.down}.weight"))
    return weights


def fuse(*matrices: np.ndarray) -> np.ndarray:
    """Matrices `[outputs, inputs]`, as checkpoints keep them, side by side in one `[inputs, outputs]`."""
    fused = np.empty((matrices[0].shape[1], sum(map(len, matrices))), np.float32)
    column = 0
    for matrix in matrices:
        for row in range(0, len(matrix), _STRIP):  # in strips that stay in the cache: a third of the time
            strip = matrix[row : row + _STRIP]
            fused[:, column : column + len(strip)] = strip.T
            column += len(strip)
    return fused


_STRIP = 256
