"""What comes later than it should: requests after a long silence, and KV of a prefill that was given up."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.failures.rig import PATIENCE, Answer, Rig
from tests.workers.serving import prompt_of
from workers.engine import Sampling, generate
from workers.models import LoadedModel
from workers.wire.deadlines import Path as NetworkPath

BLOCK_BYTES = 16 * 2048
TOKENS = 60


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path, {"handoff": "one-shot"}, kv_bytes=40 * BLOCK_BYTES) as running:
        yield running
        running.check_books()


def test_after_idling_for_several_deadlines_a_request_is_answered(tiny: LoadedModel, rig: Rig) -> None:
    prompt = prompt_of(100)
    expected = generate(tiny, prompt, Sampling(max_tokens=TOKENS, ignore_eos=True))

    async def test() -> None:
        await rig.settled()
        await asyncio.sleep(2 * NetworkPath(patience=PATIENCE).stall_s)
        answer = await rig.stream(Answer(), prompt, TOKENS)
        assert answer.ids == expected
        await rig.settled()
        assert rig.record(answer.request_id)["pdd_kv_repairs"] == 0

    rig.run(test())


def test_kv_of_a_prefill_that_comes_back_is_not_written_to_blocks_that_have_a_new_owner(
    tiny: LoadedModel, rig: Rig
) -> None:
    """The pools are so small that the requests after the loss use the blocks that the lost transfers were filling."""
    prompts = [prompt_of(320, seed=seed) for seed in (1, 2, 3)]
    expected = [generate(tiny, prompt, Sampling(max_tokens=TOKENS, ignore_eos=True)) for prompt in prompts]
    ways = [rig.ways["p0", name] for name in ("rld0", "md0")]

    async def test() -> None:
        for way in ways:
            way.hold("kv", "there", after_bytes=300_000)
        first = asyncio.create_task(rig.stream(Answer(), prompts[0], TOKENS))
        await rig.until(lambda: all(way.holds("kv", "there") for way in ways), "half of the KV is there")
        await rig.fault("half-open", "p0")
        lost = await first
        assert lost.ids == expected[0]
        assert rig.record(lost.request_id)["pdd_recovery"][0]["lost"] == "p0"
        later = [Answer(), Answer()]
        asking = [
            asyncio.create_task(rig.stream(answer, prompt, TOKENS))
            for answer, prompt in zip(later, prompts[1:], strict=True)
        ]
        await rig.until(lambda: all(len(answer.ids) > 3 for answer in later), "the blocks have new owners")
        await rig.heal()
        await asyncio.gather(*asking)
        assert [answer.ids for answer in later] == expected[1:]
        await rig.settled()
        again = await rig.stream(Answer(), prompts[0], TOKENS)
        assert again.ids == expected[0]

    rig.run(test())
