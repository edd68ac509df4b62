"""The files of a Hugging Face checkpoint directory: JSON, and which safetensors file holds which tensor.

`model.safetensors.index.json` decides where there is one; whatever else lies in the directory then is not looked at.
Without it a tensor may be in one file only. A tensor that the model would leave unused is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from workers.models.config import ModelError

_INDEX = "model.safetensors.index.json"
_MAX_JSON_BYTES = 4 << 20  # config.json has some kB, tokenizer_config.json of many added tokens some 100 kB
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
        """Where the index says that tensors are; checks that they are there, and nothing else is."""
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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. Raises ModelError."""
    try:
        found = json.loads(read_bounded(path))
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); it belongs to a checkpoint directory") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the checkpoint again") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a JSON object; fetch the checkpoint again")
    return found


def read_bounded(path: Path, limit: int = _MAX_JSON_BYTES) -> bytes:
    """The content of a file. Raises ValueError when it is longer than `limit` bytes, as only broken ones are."""
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it is larger than {limit >> 20} MiB")
    return content


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
