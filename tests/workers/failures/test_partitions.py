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
            broken.hold(channel, "there", 0 if needle else 100_000, needle)  # type: ignore[arg-type]
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


def test_what_the_relay_said_last_is_said_again_by_main_decode(tiny: LoadedModel, rig: Rig) -> None:
    """The relay's tokens are lost on their way to the gateway, its ids are not on their way to main decode."""
    prompt = prompt_of(100, seed=next(SEEDS))
    expected = generate(tiny, prompt, Sampling(max_tokens=TOKENS, ignore_eos=True))
    answer = Answer()
    heard, main = rig.ways["gw0", "rld0"], rig.ways["gw0", "md0"]

    async def test() -> None:
        try:
            heard.hold("control", "back", needle=b"tokens")
            main.hold("control", "back", needle=b"tokens")
            asking = asyncio.create_task(rig.stream(answer, prompt, TOKENS))
            await rig.until(lambda: main.holds("control", "back", b"tokens"), "main decode has taken over")
            assert heard.holds("control", "back", b"tokens")
            assert answer.ids == []
            main.release()
            await rig.fault("kill", "rld0")
            await asking
        finally:
            await rig.heal()
            await rig.settled()

    rig.run(test())
    assert answer.ids == expected
    assert set(answer.instances) == {"md0"}
    record = rig.record(answer.request_id)
    assert record["pdd_replays"] == 0
    assert [(loss["lost"], loss["how"]) for loss in record["pdd_recovery"]] == [("rld0", "goes-on")]
