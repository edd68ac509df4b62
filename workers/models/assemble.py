"""From a checkpoint's tensors to our weights: one walk for every format, which differ in names and pair
layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from workers.models.config import ModelConfig
from workers.models.rope import interleave
from workers.models.weights import check_memory


@dataclass(frozen=True)
class Names:
    """The names of a format's tensors, without `.weight` and `.bias`; `layer` takes the layer's index."""

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
    # of latent attention
    q_a: str = ""
    q_a_norm: str = ""
    q_b: str = ""
    kv_a: str = ""
    kv_a_norm: str = ""
    kv_b: str = ""
    # of a mixture of experts
    router: str = ""


Read = Callable[[str], np.ndarray]


def assemble(config: ModelConfig, names: Names, read: Read, paired: bool) -> dict[str, np.ndarray]:
    """Weights as `weights.py` names them, from `read(tensor name)`: float32, matrices `[outputs, inputs]`.

    `paired` says that the rotated rows of q and k already are in our pair layout.
    """

    check_memory(config)
    weights = {"norm": read(f"{names.norm}.weight")}
    if config.tied:
        weights["head"] = fuse(read(f"{names.embed}.weight"))
    else:
        weights["head"] = fuse(read(f"{names.head}.weight"))
        weights["embed"] = read(f"{names.embed}.weight")
    for index in range(config.layers):
        theirs, ours = names.layer.format(index), f"layers.{index}."
        weights[ours + "attn_norm"] = read(f"{theirs}{names.attn_norm}.weight")
        attention = _latent if config.latent else _grouped
        weights |= {ours + name: array for name, array in attention(config, names, theirs, read, paired).items()}
        weights[ours + "out"] = fuse(read(f"{theirs}{names.out}.weight"))
        weights[ours + "ffn_norm"] = read(f"{theirs}{names.ffn_norm}.weight")
        if config.mixed(index):
            weights |= {ours + name: array for name, array in _experts(config, names, theirs, read).items()}
        else:
            weights |= {ours + name: array for name, array in _ffn(names, theirs, "", read).items()}
    return weights


def _ffn(names: Names, theirs: str, part: str, read: Read) -> dict[str, np.ndarray]:
    """A SwiGLU feed-forward: the layer's own, or that of a `part` of its mixture."""

    def name(of: str) -> str:
        place, _, last = of.rpartition(".")
        return f"{theirs}{place}.{part}{last}.weight" if place else f"{theirs}{last}.weight"

    gate_up = fuse(read(name(names.gate)), read(name(names.up)))
    return {"gate_up": gate_up, "down": fuse(read(name(names.down)))}


def _experts(config: ModelConfig, names: Names, theirs: str, read: Read) -> dict[str, np.ndarray]:
    experts = config.experts
    assert experts is not None
    each = [_ffn(names, theirs, f"experts.{number}.", read) for number in range(experts.count)]
    weights = _ffn(names, theirs, "shared_experts.", read) | {
        "router": fuse(read(f"{theirs}{names.router}.weight")),
        "experts_gate_up": np.stack([one["gate_up"] for one in each]),
        "experts_down": np.stack([one["down"] for one in each]),
    }
    if experts.biased:
        weights["router_bias"] = read(f"{theirs}{names.router}.e_score_correction_bias")
    return weights


def _grouped(config: ModelConfig, names: Names, theirs: str, read: Read, paired: bool) -> dict[str, np.ndarray]:
    def rotated(name: str) -> np.ndarray:
        rows = read(theirs + name)
        return rows if paired else interleave(rows, config.head_dim)

    q, k, v = names.q, names.k, names.v
    weights = {"qkv": fuse(rotated(f"{q}.weight"), rotated(f"{k}.weight"), read(f"{theirs}{v}.weight"))}
    if config.qkv_bias:
        weights["qkv_bias"] = np.concatenate([rotated(f"{q}.bias"), rotated(f"{k}.bias"), read(f"{theirs}{v}.bias")])
    if config.qk_norm:
        weights |= {"q_norm": rotated(f"{names.q_norm}.weight"), "k_norm": rotated(f"{names.k_norm}.weight")}
    return weights


def _latent(config: ModelConfig, names: Names, theirs: str, read: Read, paired: bool) -> dict[str, np.ndarray]:
    latent = config.latent
    assert latent is not None

    def rotated(rows: np.ndarray) -> np.ndarray:
        """The last `rope_dim` of each head's rows are rotated."""
        if paired:
            return rows
        heads = rows.reshape(-1, latent.query_dim, rows.shape[1])
        turned = interleave(heads[:, latent.nope_dim :].reshape(-1, rows.shape[1]), latent.rope_dim)
        plain = heads[:, : latent.nope_dim]
        return np.concatenate((plain, turned.reshape(len(heads), latent.rope_dim, -1)), axis=1).reshape(rows.shape)

    kv = read(f"{theirs}{names.kv_a}.weight")
    if not paired:
        kv = np.concatenate((kv[: latent.kv_rank], interleave(kv[latent.kv_rank :], latent.rope_dim)))
    up = read(f"{theirs}{names.kv_b}.weight").reshape(config.heads, -1, latent.kv_rank)
    weights = {
        "kv_norm": read(f"{theirs}{names.kv_a_norm}.weight"),
        "k_up": np.ascontiguousarray(up[:, : latent.nope_dim]),
        "v_up": np.ascontiguousarray(up[:, latent.nope_dim :].swapaxes(1, 2)),
    }
    if latent.query_rank:
        weights["q_norm"] = read(f"{theirs}{names.q_a_norm}.weight")
        weights["q_up"] = fuse(rotated(read(f"{theirs}{names.q_b}.weight")))
        return weights | {"first": fuse(read(f"{theirs}{names.q_a}.weight"), kv)}
    return weights | {"first": fuse(rotated(read(f"{theirs}{names.q}.weight")), kv)}


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
