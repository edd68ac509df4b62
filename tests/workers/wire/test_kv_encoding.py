"""Eight-bit KV: close to what it was, in a quarter of the bytes, token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.wire.kv_encoding import GROUP, Fp8

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def raw(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytearray(tensor.contiguous().view(torch.uint8).numpy().tobytes()))


def there_and_back(encoding: Fp8, kv: torch.Tensor) -> torch.Tensor:
    into = memoryview(bytearray(len(raw(kv))))
    encoded = encoding.encode(raw(kv))
    assert len(encoded) == len(kv) * encoding.bytes_per_token
    encoding.decode(encoded, into)
    return torch.frombuffer(into, dtype=kv.dtype).view(kv.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 2, 2, 32), (30, 2, 3, 64), (2, 80), (1, 1, 1, 7)])
def test_a_value_is_off_by_a_sixteenth_at_most(dtype: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    kv = (torch.randn(5, *shape) * torch.logspace(-3, 2, shape[-1])).to(DTYPES[dtype])
    back = there_and_back(Fp8(shape, kv.dtype), kv)
    largest = kv.float().abs().unflatten(-1, (-1, max(d for d in range(1, GROUP + 1) if shape[-1] % d == 0)))
    # values far below the largest of their group are subnormal: off by half of the smallest step at most
    step = (largest.amax(-1, keepdim=True) / 448 * 2**-9 * 2).expand(largest.shape).flatten(-2)
    allowed = torch.maximum(kv.float().abs() / 16, step)
    assert (kv.float() - back.float()).abs().le(allowed * 1.01).all()


def test_bytes_are_a_quarter_of_fp32_and_half_of_bf16_and_one_in_33_is_an_exponent() -> None:
    encoding = Fp8((4, 2, 2, 32), torch.float32)
    assert encoding.bytes_per_token == 512 + 16
    assert encoding.bytes_per_token / (512 * 4) == pytest.approx(0.258, abs=0.001)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=32, max_size=32))
def test_any_finite_values_come_back_finite_and_none_saturates(values: list[float]) -> None:
    kv = torch.tensor(values).view(1, 1, 32)
    back = there_and_back(Fp8((1, 32), torch.float32), kv)
    assert torch.isfinite(back).all()
    assert (back.abs().amax() >= kv.abs().amax() * 15 / 16) or kv.abs().amax() < 2.0**-110


def test_zeros_and_what_eight_bits_can_say_come_back_exactly() -> None:
    exact = torch.tensor([0.0, 1.0, -1.125, 448.0, 2.0**-6, 0.5, -240.0, 3.5] * 4).view(1, 1, 32)
    encoding = Fp8((1, 32), torch.float32)
    assert torch.equal(there_and_back(encoding, exact), exact)
    assert torch.equal(there_and_back(encoding, torch.zeros(3, 1, 32)), torch.zeros(3, 1, 32))


def test_the_first_tokens_of_a_block_are_the_first_bytes() -> None:
    torch.manual_seed(2)
    kv = torch.randn(16, 4, 2, 2, 32)
    encoding = Fp8((4, 2, 2, 32), torch.float32)
    whole = bytes(encoding.encode(raw(kv)))
    assert bytes(encoding.encode(raw(kv[:5]))) == whole[: 5 * encoding.bytes_per_token]
