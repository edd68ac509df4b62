"""KV in fewer bytes for a slow link: eight-bit floats with a shared exponent for each 32 values. Lossy; owns no memory.

The format is OCP Microscaling's MXFP8 (E4M3 values, E8M0 exponents), per token, so that the first n tokens of a block
are still a contiguous run of bytes: `[values of all layers, kv_shape's order, u8][exponents of all groups, u8]`. A
group never crosses a head: it is the largest divisor of the last dimension up to 32. An exponent e stands for
2**(e - 127), and is the smallest with which no value of its group exceeds 448, so that nothing saturates; a value is
off by at most 1/16 of itself.
"""

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch

GROUP = 32
LARGEST = 448.0  # of float8_e4m3fn
BIAS = 127
MOST = 126  # of an exponent: what a normal float can be multiplied by


class KvEncoding(Protocol):
    """An encoding of KV on the wire, where it is not as it is in the pool."""

    name: str
    bytes_per_token: int

    def encode(self, kv: memoryview) -> memoryview:
        """Bytes for the wire of whole tokens, in memory of their own."""
        ...

    def decode(self, data: memoryview, into: memoryview) -> None:
        """The other way, of as many tokens as `into` holds."""
        ...


class Fp8:
    """MXFP8 of KV whose tokens are `kv_shape` elements of `dtype`."""

    name = "fp8"

    def __init__(self, kv_shape: Sequence[int], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._elements = prod(kv_shape)
        self._group = max(size for size in range(1, GROUP + 1) if kv_shape[-1] % size == 0)
        self._groups = self._elements // self._group
        self.bytes_per_token = self._elements + self._groups

    def encode(self, kv: memoryview) -> memoryview:
        values = torch.frombuffer(kv, dtype=self._dtype).float().view(-1, self._groups, self._group)
        exponents = torch.frexp(values.abs().amax(-1) / LARGEST).exponent.clamp_(-MOST, MOST)
        small = (values * _power_of_two(-exponents)[..., None]).to(torch.float8_e4m3fn)
        encoded = torch.empty(len(values), self.bytes_per_token, dtype=torch.uint8)
        encoded[:, : self._elements] = small.view(torch.uint8).flatten(1)
        encoded[:, self._elements :] = exponents + BIAS
        return encoded.numpy().data.cast("B")

    def decode(self, data: memoryview, into: memoryview) -> None:
        encoded = torch.frombuffer(data, dtype=torch.uint8).view(-1, self.bytes_per_token)
        small = encoded[:, : self._elements].contiguous().view(torch.float8_e4m3fn).float()
        exponents = encoded[:, self._elements :].int() - BIAS
        values = small.view(-1, self._groups, self._group) * _power_of_two(exponents.clamp_(-MOST, MOST))[..., None]
        torch.frombuffer(into, dtype=self._dtype).copy_(values.flatten())


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2**exponents exactly, written as a float's bits: several times faster than `ldexp`."""
    return ((exponents + BIAS) << 23).view(torch.float32)
