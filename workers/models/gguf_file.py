"""Reads the container format GGUF (version 2 and 3, little-endian): metadata and tensors. Knows no model.

The `gguf` package does the dequantising; its own reader makes a numpy array of every string in the vocabulary
and takes 2.3 s for SmolLM2's header, this one 0.06 s. Format: ggml's docs/gguf.md.

A file is foreign data: what a header may ask for is bounded, so that a broken one costs neither memory nor time.
"""

from __future__ import annotations

import math
import mmap
import re
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
_MAX_PAIRS = 10_000  # files have dozens, and one or two a layer at most
_MAX_TENSORS = 100_000
_MAX_STRINGS = 2_000_000  # of all arrays: a vocabulary of 256,000 with its merges has 800,000
_MAX_TEXT_BYTES = 64 << 20
_MAX_AXES = 4  # ggml's own limit

Tensor = tuple[tuple[int, ...], GGMLQuantizationType, int, mmap.mmap]
"""Shape, type, offset in the file, and the file."""


class GgufFile:
    """`metadata` holds plain Python values, arrays of numbers as numpy's; tensors are dequantised on demand.

    Of a model in several parts `path` is the first, and the others are opened too. Raises ModelError when broken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        part = _Part(path)
        self.metadata = part.metadata
        self._tensors = part.tensors
        self._used: set[str] = set()
        self._add_parts()

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
        """A tensor as float32, its axes in numpy's order (outputs first for a matrix). It counts as used."""
        if name not in self._tensors:
            raise ModelError(f"{self.path}: tensor {name} is missing; the file is incomplete, fetch it again")
        self._used.add(name)
        shape, kind, offset, data = self._tensors[name]
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block_elements:
            raise ModelError(
                f"{self.path}: tensor {name} of {shape} is not in blocks of {block_elements}; fetch it again"
            )
        row_bytes = shape[-1] // block_elements * block_bytes
        size = math.prod(shape[:-1]) * row_bytes
        if offset + size > len(data):
            raise ModelError(f"{self.path}: ends within tensor {name}; the file is incomplete, fetch it again")
        raw = np.frombuffer(data, np.uint8, size, offset).reshape(*shape[:-1], row_bytes)
        try:
            values = dequantize(raw, kind).reshape(shape)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} has type {kind.name}, which cannot be read; "
                "take a file quantised otherwise"
            ) from error
        return np.require(values, np.float32, ["W"])  # writable, as torch wants its memory to be

    def check_all_used(self) -> None:
        """Raises ModelError when a tensor was left out."""
        if unused := sorted(self._tensors.keys() - self._used):
            raise ModelError(
                f"{self.path}: tensor {unused[0]} has no place in this kind of model, and leaving it out would change "
                "the answers; take another model"
            )

    def _add_parts(self) -> None:
        count = self.metadata.get("split.count", 0)
        if count in (0, 1):
            return
        number = self.metadata.get("split.no", 0)
        match = re.search(r"-00001-of-(\d{5})(\.gguf)$", self.path.name, re.IGNORECASE)
        if number != 0 or match is None or int(match[1]) != count:
            raise ModelError(
                f"{self.path}: is part {number + 1} of a model in {count} parts; name the first, whose name "
                f"ends in -00001-of-{count:05}.gguf, with the others beside it"
            )
        for number in range(2, count + 1):
            path = self.path.with_name(f"{self.path.name[: match.start()]}-{number:05}-of-{match[1]}{match[2]}")
            if not path.is_file():
                raise ModelError(f"{self.path}: part {number} of {count} is missing; put {path.name} beside it")
            part = _Part(path)
            if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number - 1, count):
                raise ModelError(f"{path}: is not part {number} of {count} of {self.path.name}; fetch it again")
            if twice := sorted(part.tensors.keys() & self._tensors.keys()):
                raise ModelError(f"{path}: tensor {twice[0]} is in another part too; fetch all parts again")
            self._tensors |= part.tensors
        total = self.metadata.get("split.tensors.count", len(self._tensors))
        if total != len(self._tensors):
            raise ModelError(f"{self.path}: its parts hold {len(self._tensors)} tensors, not {total}; fetch them again")


class _Part:
    """Header of one file: metadata and where its tensors are."""

    def __init__(self, path: Path) -> None:
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self._strings = self._text_bytes = 0
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read_header()
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror}); check the path") from error
        except (ValueError, struct.error, IndexError, KeyError, UnicodeDecodeError, MemoryError) as error:
            at = f" at byte {self._offset}" if hasattr(self, "_offset") else ""
            raise ModelError(f"{path}: not a readable GGUF file ({error}{at}); fetch it again") from error

    def _read_header(self) -> None:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, tensors, pairs = struct.unpack_from("<IQQ", self._data, 4)
        if version not in (2, 3):
            big = int.from_bytes(struct.pack("<I", version), "big") in (2, 3)
            raise ValueError("big-endian, of another kind of machine" if big else f"version {version}")
        if pairs > _MAX_PAIRS or tensors > _MAX_TENSORS:
            raise ValueError(f"{pairs} keys and {tensors} tensors")
        self._offset = 24
        for _ in range(pairs):
            key = self._string()
            if key in self.metadata:
                raise ValueError(f"{key} twice")
            self.metadata[key] = self._value(self._scalar(4))
        infos = {}
        for _ in range(tensors):
            name = self._string()
            if name in infos:
                raise ValueError(f"tensor {name} twice")
            axes = self._scalar(4)
            if axes > _MAX_AXES:
                raise ValueError(f"tensor {name} of {axes} axes")
            shape = tuple(self._scalar(10) for _ in range(axes))[::-1]
            infos[name] = (shape, GGMLQuantizationType(self._scalar(4)), self._scalar(10))
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment {alignment}")
        start = -(-self._offset // alignment) * alignment
        self.tensors = {name: (shape, kind, start + at, self._data) for name, (shape, kind, at) in infos.items()}

    def _scalar(self, kind: int) -> Any:
        layout = _SCALARS[kind]
        (value,) = layout.unpack_from(self._data, self._offset)
        self._offset += layout.size
        return value

    def _string(self) -> str:
        length = self._scalar(10)
        end = self._offset + length
        self._text_bytes += length
        if end > len(self._data):
            raise ValueError("a string runs past the end")
        if self._text_bytes > _MAX_TEXT_BYTES:
            raise ValueError(f"more than {_MAX_TEXT_BYTES >> 20} MiB of text")
        text = self._data[self._offset : end].decode("utf-8")
        self._offset = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(kind)
        item, count = self._scalar(4), self._scalar(10)
        if item == _ARRAY:
            raise ValueError("an array of arrays")  # which ggml has none of either
        if count > len(self._data) - self._offset:
            raise ValueError("an array runs past the end")
        if item != _STRING:
            layout = np.dtype(_SCALARS[item].format)
            values = np.frombuffer(self._data, layout, count, self._offset)
            self._offset += values.nbytes
            return values
        self._strings += count
        if self._strings > _MAX_STRINGS:
            raise ValueError(f"more than {_MAX_STRINGS} strings")
        return [self._string() for _ in range(count)]
