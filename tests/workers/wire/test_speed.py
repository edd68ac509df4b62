"""KV over loopback, checksums on, next to a plain socket on the same machine.

The short form of benchmarks/transport.py, which measures it in bytes per second.
"""

import pytest

from benchmarks.transport import measure, plain_socket

BYTES = 128 << 20


@pytest.mark.quiet
@pytest.mark.parametrize("model", ["tiny", "smollm2-fp32"])
def test_kv_crosses_at_a_good_share_of_what_a_plain_socket_carries(model: str) -> None:
    """Every byte is summed twice besides: half of the plain rate was measured; a copy too many would show."""
    row = measure(model, transfers=1, rounds=5, total=BYTES)
    assert row.bytes_per_s >= 0.25 * plain_socket(BYTES, rounds=5), row
