"""What a streamed token costs the gateway, by `benchmarks/gateway.py` in its short form.

Here CPU time only, which a busy machine hardly changes; the benchmark also measures latency (results/gateway.json).
"""

import asyncio

import pytest

from benchmarks.gateway import LIMIT_MS, measure


@pytest.mark.quiet
def test_a_streamed_token_costs_the_gateway_less_than_the_limit_and_all_tokens_come_in_order() -> None:
    found = asyncio.run(measure(tokens=400, streams=8, rounds=1))
    assert 0 < found["overhead_cpu_ms"] < LIMIT_MS, found
