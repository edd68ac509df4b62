"""Pools whose memory the wire cannot reach, as on an accelerator: here one whose host copy is kept apart on purpose.

Nothing of it is a stand-in but the place of the memory: every copy that a GPU needs is needed here, too, and one that
is forgotten leaves zeros or another request's KV behind.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.serving import SlowWan, prompt_of, run
from workers.engine import BlockPool, Sampling, generate
from workers.models import LoadedModel
from workers.models.load import TINY


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engine.blocks.needs_staging", lambda device: True)


def test_a_view_shows_the_device_and_what_is_written_counts_when_it_is_stored() -> None:
    pool = BlockPool(TINY, num_blocks=4, block_size=2)
    pool.storage.copy_(torch.randn(pool.storage.shape))
    assert bytes(pool.view(1, 2)) == pool.storage[1].numpy().tobytes()
    before = pool.storage.clone()
    room = pool.room(2, 2)
    assert bytes(room) == bytes(len(room)), "room is not fetched"
    written = torch.randn(pool.storage[2].shape)
    room[:] = written.numpy().tobytes()
    assert torch.equal(pool.storage, before)
    assert pool.store([2]) > 0
    assert torch.equal(pool.storage[2], written)
    assert torch.equal(pool.storage[[0, 1, 3]], before[[0, 1, 3]])
    assert pool.stage is not None
    assert (pool.stage.fetched.copies, pool.stage.stored.copies) == (1, 1)
    assert pool.stage.stored.bytes == pool.stage.fetched.bytes == 2 * pool.bytes_per_token


def test_neighbouring_blocks_are_one_copy_and_no_other_block_is_touched() -> None:
    pool = BlockPool(TINY, num_blocks=8, block_size=2)
    for block in range(8):
        pool.room(block, 2)[:] = bytes([block + 1]) * (2 * pool.bytes_per_token)
    pool.store([5, 1, 2, 6])
    assert [bool(pool.storage[block].any()) for block in range(8)] == [
        False,
        True,
        True,
        False,
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    "serving",
    [
        {"handoff": "one-shot"},
        {"handoff": "kv"},
        {"handoff": "catch-up", "kv_send": "chunked", "kv_chunk": 32},
        {"handoff": "overlap", "speculative": {}},
    ],
    ids=lambda serving: ", ".join(map(str, serving.values())),
)
def test_the_whole_relay_answers_as_alone(tiny: LoadedModel, tmp_path: Path, serving: dict[str, Any]) -> None:
    prompt = prompt_of(300)
    following = prompt + prompt_of(40, seed=4)

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving=serving) as lab:
            for ids in (prompt, following):  # the second finds a part of itself in every cache
                expected = generate(tiny, ids, Sampling(max_tokens=60, ignore_eos=True))
                answer = await lab.complete_after_relay(ids, 60, relayed=5, ignore_eos=True)
                assert answer["pdd"]["token_ids"] == expected
                assert set(answer["pdd"]["instances"]) == {"rld0", "md0"}
                await lab.check_released()
            copies = {
                span["instance"]: span for span in answer["pdd"]["record"]["pdd_spans"] if span["name"] == "host-copy"
            }
            assert copies.keys() == {"rld0", "md0"}
            assert all(span["end_ns"] > span["start_ns"] for span in copies.values())

    run(test())
