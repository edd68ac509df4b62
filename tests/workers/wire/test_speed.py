"""KV over loopback, checksums on, at 1 GB/s: the short form of benchmarks/transport.py."""

import pytest

from benchmarks.transport import TARGET_BYTES_PER_S, measure


@pytest.mark.quiet
@pytest.mark.parametrize("model", ["tiny", "smollm2-fp32"])
def test_a_gigabyte_a_second_from_block_to_block(model: str) -> None:
    row = measure(model, transfers=1, rounds=5, total=128 << 20)
    assert row.bytes_per_s >= TARGET_BYTES_PER_S, row
