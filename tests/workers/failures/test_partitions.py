"""One way between two workers breaks, everything else holds: the answer is the control's, by whoever can go on."""

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from tests.workers.failures.rig import Answer, Rig
from tests.workers.serving import prompt_of
from workers.engine import Sampling, generate
from workers.models import LoadedModel

TOKENS = 120
SEEDS = itertools.count(9000)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("rig"), {"handoff": "one-shot"}) as running:
        yield running
        running.check_books()


@pytest.mark.parametrize("fault", ["cut", "half-open"])
@pytest.mark.parametrize(
    ("way", "channel", "needle"),
    [
        (("p0", "md0"), "kv", b""),
        (("p0", "rld0"), "kv", b""),
        (("rld0", "md0"), "control", b"token-ids"),
    ],
    ids=["wan-transfer", "fabric-transfer", "hand-over"],
)
def test_of_one_way(tiny: LoadedModel, rig: Rig, way: tuple[str, str], channel: str, needle: bytes, fault: str) -> None:
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
