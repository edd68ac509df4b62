"""The tests of equality are worth something: with any one block of KV zeroed the answer changes.

Measured with SmolLM2 as well: on 500 tokens of prose each of the 32 blocks changes an answer of 48 tokens.
It is no law for a trained model: on a list of 30 facts, of which the answer repeats the first ones, half of
the blocks do not.
"""

import pytest

from tests.workers.engine.drive import LENGTHS, Stand, prompt
from workers.models import LoadedModel, ModelSpec, load_model


def blocks_without_effect(loaded: LoadedModel, tokens: list[int], max_tokens: int) -> list[int]:
    """Which blocks of the prompt's KV can be zeroed after prefill without changing the greedy answer."""
    blocks = -(-len(tokens) // 16)
    stand = Stand(loaded, num_blocks=(blocks + 1) * (blocks + 1 + -(-max_tokens // 16)))
    intact = stand.admit(tokens, max_tokens=max_tokens)
    stand.feed(intact, len(tokens))
    zeroed = []
    for block in range(blocks):
        copy = stand.admit(intact.tokens, prompt_len=len(tokens), max_tokens=max_tokens)
        stand.pool.storage[copy.blocks[:blocks]] = stand.pool.storage[intact.blocks[:blocks]]
        stand.pool.storage[copy.blocks[block]] = 0
        copy.computed = len(tokens)
        zeroed.append(copy)
    stand.finish(intact, *zeroed)
    return [index for index, sequence in enumerate(zeroed) if sequence.tokens == intact.tokens]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("name", "seed"), [("tiny", 0), ("tiny", 1), ("tiny-mla", 0), ("tiny-mla", 1)])
def test_every_block_of_a_built_in_model_matters(name: str, length: int, seed: int) -> None:
    loaded = load_model(ModelSpec(name, seed))
    assert blocks_without_effect(loaded, prompt(loaded, length), max_tokens=32) == []


@pytest.mark.nightly
def test_every_block_of_a_page_of_prose_matters_to_smollm2(smollm2: LoadedModel) -> None:
    assert blocks_without_effect(smollm2, prompt(smollm2, 150), max_tokens=48) == []
