"""Reads the container format GGUF (version 2 and 3, little-endian): metadata and tensors. Knows no model.

The `gguf` package does the dequantising; its own reader makes a numpy array of every string in the vocabulary
and takes 2.3 s for SmolLM2's header, this one 0.06 s. Format: ggml's docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from workers.models.config import ModelError

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9


class GgufFile:
    """`metadata` holds plain Python values; tensors are dequantised on demand. Raises ModelError when
    broken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._tensors: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read_header()
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror}); check the path") from error
        except (ValueError, struct.error, IndexError, KeyError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: not a readable GGUF file ({error}); fetch it again") from error

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata below the architecture's own prefix, such as `block_count`. Without a default it must
        exist.
        """
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelError(
                f"{self.path}: {self.architecture}.{key} is missing; the file is incomplete, fetch it again"
            )
        return value

    def tensor(self, name: str) -> np.ndarray:
        """A tensor as float32, its axes in numpy's order (outputs first for a matrix)."""
        if name not in self._tensors:
            raise ModelError(f"{self.path}: tensor {name} is missing; the file is incomplete, fetch it again")
        shape, kind, offset = self._tensors[name]
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = shape[-1] // block_elements * block_bytes
        size = int(np.prod(shape[:-1])) * row_bytes
        if offset + size > len(self._data):
            raise ModelError(f"{self.path}: ends within tensor {name}; the file is incomplete, fetch it again")
        raw = np.frombuffer(self._data, np.uint8, size, offset).reshape(*shape[:-1], row_bytes)
        try:
            values = dequantize(raw, kind).reshape(shape)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} has type {kind.name}, which cannot be read; "
                "take a file quantised otherwise"
            ) from error
        return np.require(values, np.float32, ["W"])  # writable, as torch wants its memory to be

    def _read_header(self) -> None:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, tensors, pairs = struct.unpack_from("<IQQ", self._data, 4)
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        self._offset = 24
        for _ in range(pairs):
            key = self._string()
            self.metadata[key] = self._value(self._scalar(4))
        infos = []
        for _ in range(tensors):
            name = self._string()
            shape = tuple(self._scalar(10) for _ in range(self._scalar(4)))[::-1]
            infos.append((name, shape, GGMLQuantizationType(self._scalar(4)), self._scalar(10)))
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-self._offset // alignment) * alignment
        self._tensors = {name: (shape, kind, start + offset) for name, shape, kind, offset in infos}

    def _scalar(self, kind: int) -> Any:
        layout = _SCALARS[kind]
        (value,) = layout.unpack_from(self._data, self._offset)
        self._offset += layout.size
        return value

    def _string(self) -> str:
        end = self._offset + 8 + self._scalar(10)
        if end > len(self._data):
            raise ValueError("a string runs past the end")
        text = self._data[self._offset : end].decode("utf-8")
        self._offset = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(kind)
        item, count = self._scalar(4), self._scalar(10)
        if count > len(self._data) - self._offset:
            raise ValueError("an array runs past the end")
        return [self._value(item) for _ in range(count)]
