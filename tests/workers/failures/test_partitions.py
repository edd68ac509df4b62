"""One way between two workers breaks, everything else holds: the answer is the control's, by whoever can go on."""

import asyncio
import itertools

import pytest

from tests.workers.failures.rig import Answer, Rig
from tests.workers.serving import prompt_of
from workers.engine import Sampling, generate
from workers.models import LoadedModel

TOKENS = 120
SEEDS = itertools.count(9000)


@pytest.mark.parametrize("fault", ["cut", "half-open"])
@pytest.mark.parametrize(
    ("way", "channel", "needle", "lost"),
    [
        (("p0", "md0"), "kv", b"", "md0"),
        (("p0", "rld0"), "kv", b"", "rld0"),
        (("rld0", "md0"), "control", b"token-ids", "rld0"),
    ],
    ids=["wan-transfer", "fabric-transfer", "hand-over"],
)
def test_of_one_way(
    tiny: LoadedModel, rig: Rig, way: tuple[str, str], channel: str, needle: bytes, lost: str, fault: str
) -> None:
    prompt = prompt_of(200, seed=next(SEEDS))
    expected = generate(tiny, prompt, Sampling(max_tokens=TOKENS, ignore_eos=True))
    answer, broken = Answer(), rig.ways[way]

    async def test() -> None:
        try:
            broken.hold(channel, "there", 0 if needle else 100_000)  # type: ignore[arg-type]
            asking = asyncio.create_task(rig.stream(answer, prompt, TOKENS))
            await rig.until(lambda: broken.holds(channel, "there", needle), "the way is in use")  # type: ignore[arg-type]
            if fault == "cut":
                broken.cut()
            else:
                broken.freeze()
            await asking
        finally:
            await rig.heal()
            await rig.settled()

    rig.run(test())
    assert answer.error is None
    assert answer.ids == expected
    record = rig.record(answer.request_id)
    assert record["success"]
    assert record["pdd_unsettled"] == []
    assert record["pdd_replays"] == 0
    if lost == "md0":
        assert record["pdd_rld_tokens"] == TOKENS, "the relay finishes, without a pause or a word"
    else:
        assert {loss["lost"] for loss in record["pdd_recovery"]} == {"rld0"}
        assert record["pdd_md_tokens"] > 0
