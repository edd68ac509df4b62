"""The engine's speed next to transformers', in short: benchmarks/engine.py measures it in full. CPU time, so that
neighbours matter less.
"""

import pytest

from benchmarks.engine import decoding, radix_match_s
from workers.models import LoadedModel


@pytest.mark.quiet
def test_one_sequence_decodes_no_slower_than_in_transformers_and_sixteen_four_times_as_fast(tiny: LoadedModel) -> None:
    together, alone, _ = decoding(tiny, rounds=3)
    assert alone >= 1  # measured: 1.8
    assert together >= 4  # measured: 10


@pytest.mark.quiet
def test_a_prompt_of_100_000_tokens_is_matched_within_5_ms() -> None:
    assert radix_match_s(rounds=10) < 5e-3
