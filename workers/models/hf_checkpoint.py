"""Hugging Face checkpoint directories as models: safetensors files, names and layouts of their tensors.

`model.safetensors.index.json` decides where there is one; whatever else lies in the directory then is not looked at.
Without it a tensor may be in one file only. A tensor that the model would leave unused is refused. Query and key rows
are brought from halves into pairs (see `rope.py`); q, k, v and gate, up are fused.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from workers.models.assemble import Names, assemble
from workers.models.config import ModelConfig, ModelError
from workers.models.hf_config import hf_config, read_bounded, read_json
from workers.models.hf_tokenizer import hf_tokenizer
from workers.models.tokenizer import TextTokenizer

_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 16 << 20  # DeepSeek-V3's has 9 MB
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class Checkpoint:
    """The tensors of a directory, by name, as float32 arrays. Raises ModelError for one that is broken or ambiguous."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, Any] = {}
        self._read: set[str] = set()
        if (directory / "adapter_config.json").exists():
            raise ModelError(f"{directory} holds an adapter (adapter_config.json); merge it into its model first")
        index = directory / _INDEX
        self._files = self._indexed(index) if index.exists() else self._found()

    def read(self, name: str) -> np.ndarray:
        """A tensor, which counts as used from now on."""
        if name not in self._files:
            raise ModelError(
                f"{self._directory}: weight {name} is missing; the checkpoint is incomplete, fetch it again"
            )
        self._read.add(name)
        try:
            tensor = self._open[self._files[name]].get_tensor(name)
        except (SafetensorError, AttributeError, RuntimeError) as error:  # also of types that only newer ones know
            file = self._directory / self._files[name]
            raise ModelError(f"{file}: weight {name} cannot be read ({error}); take the model in bfloat16") from error
        return _to_float32(tensor, f"{self._directory}: weight {name}")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def check_all_used(self, neutral: Collection[str]) -> None:
        """Raises ModelError when a tensor was left out that matches none of the patterns `neutral`."""
        for name in sorted(self._files.keys() - self._read):
            if not any(re.fullmatch(pattern, name) for pattern in neutral):
                raise ModelError(
                    f"{self._directory / self._files[name]}: weight {name} has no place in this kind of model, and "
                    "leaving it out would change the answers; take another model, or remove the file if it is a stray"
                )

    def _indexed(self, index: Path) -> dict[str, str]:
        """The files of tensors, as the index says; checks that they are there, and nothing else is."""
        try:
            files = msgspec.json.decode(read_bounded(index, _MAX_INDEX_BYTES), type=_Index).weight_map
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ModelError(f"{index} is not a readable index ({error}); fetch the checkpoint again") from error
        for file in sorted(set(files.values())):
            path = PurePosixPath(file)
            if path.is_absolute() or ".." in path.parts or path.suffix.lower() != ".safetensors":
                raise ModelError(f"{index} names {file!r}, which is no .safetensors file below it; fetch it again")
            if not (self._directory / file).is_file():
                raise ModelError(f"{index} names {file}, which is not there; the checkpoint is incomplete, fetch it")
            held = self._keys(file)
            listed = {name for name, place in files.items() if place == file}
            if lacking := sorted(listed - held):
                raise ModelError(
                    f"{self._directory / file} lacks {lacking[0]}, which {_INDEX} says is in it; fetch both again"
                )
            if unlisted := sorted(held - files.keys()):
                raise ModelError(f"{index} does not list {unlisted[0]}, which is in {file}; fetch both again")
        return files

    def _found(self) -> dict[str, str]:
        """All `.safetensors` files without an index; `consolidated*` is the same model in Mistral's own names."""
        # a file whose name begins with a dot is macOS's note about another
        seen = [path for path in self._directory.iterdir() if path.is_file() and not path.name.startswith(".")]
        paths = [path for path in seen if path.suffix.lower() == ".safetensors"]
        other = [path.name for path in seen if re.search(r"\.safetensors\.index\b.*\.json$", path.name, re.IGNORECASE)]
        if other:
            raise ModelError(
                f"{self._directory} has {sorted(other)[0]} and no {_INDEX}; take the one in Hugging Face's layout"
            )
        named = sorted(path.name for path in paths if not path.name.lower().startswith("consolidated"))
        names = named or sorted(path.name for path in paths)
        if not names:
            raise ModelError(f"{self._directory} holds no .safetensors file; convert or fetch the checkpoint")
        files: dict[str, str] = {}
        for file in names:
            for name in self._keys(file):
                if name in files:
                    raise ModelError(
                        f"{self._directory}: weight {name} is in both {files[name]} and {file}, and no {_INDEX} says "
                        "which one counts; remove the one that is a stray"
                    )
                files[name] = file
        return files

    def _keys(self, file: str) -> set[str]:
        path = self._directory / file
        try:
            self._open[file] = safe_open(path, framework="pt")
            return set(self._open[file].keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a readable safetensors file ({error}); fetch it again") from error


def _to_float32(tensor: torch.Tensor, what: str) -> np.ndarray:
    """Without a torch operation (see `weights.py`): bfloat16 is the upper half of float32."""
    if tensor.dtype not in _FLOATS:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(
            f"{what} is {kind}: quantised weights are not supported; take the model in bfloat16 or float32"
        )
    if tensor.dtype == torch.bfloat16:
        return (tensor.view(torch.uint16).numpy().astype(np.uint32) << 16).view(np.float32)
    return tensor.numpy().astype(np.float32, copy=False)


_NAMES = Names(
    embed="model.embed_tokens",
    head="lm_head",
    norm="model.norm",
    layer="model.layers.{}.",
    attn_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    out="self_attn.o_proj",
    ffn_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    q_a="self_attn.q_a_proj",
    q_a_norm="self_attn.q_a_layernorm",
    q_b="self_attn.q_b_proj",
    kv_a="self_attn.kv_a_proj_with_mqa",
    kv_a_norm="self_attn.kv_a_layernorm",
    kv_b="self_attn.kv_b_proj",
    router="mlp.gate",
)


_NEUTRAL = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
"""Tensors that may be left out: tables that old checkpoints kept."""


def load_hf(directory: Path) -> tuple[ModelConfig, dict[str, np.ndarray], TextTokenizer]:
    """Configuration, fused float32 weights and tokenizer of a checkpoint directory. Raises ModelError."""
    given = read_json(directory / "config.json")
    config = hf_config(directory, given)
    # DeepSeek's own code rotates neighbours; V3 checkpoints that were converted say so.
    paired = config.latent is not None and (given["model_type"] != "deepseek_v3" or given.get("rope_interleave", True))
    checkpoint = Checkpoint(directory)
    names, neutral = _NAMES, list(_NEUTRAL)
    if config.tied and f"{names.head}.weight" in checkpoint:
        config, names = _untie(config, checkpoint)
    for extra in range(given.get("num_nextn_predict_layers", given.get("num_mtp_layers", 0)) or 0):
        neutral.append(rf"model\.layers\.{config.layers + extra}\..*")  # guesses further tokens, which we do not
    weights = assemble(config, names, checkpoint.read, paired)
    checkpoint.check_all_used(neutral)
    return config, weights, hf_tokenizer(directory, config)


def _untie(config: ModelConfig, checkpoint: Checkpoint) -> tuple[ModelConfig, Names]:
    """What a head in the checkpoint of a tied model means, as transformers has it: the one matrix, where the
    embedding is the same or missing, and otherwise that the configuration is wrong.
    """
    if f"{_NAMES.embed}.weight" not in checkpoint:
        return config, replace(_NAMES, embed=_NAMES.head)
    head, embed = (checkpoint.read(f"{name}.weight") for name in (_NAMES.head, _NAMES.embed))
    return replace(config, tied=np.array_equal(head, embed)), _NAMES
