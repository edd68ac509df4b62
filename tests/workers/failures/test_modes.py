"""Losses in the middle of the hand-over, in every mode that is not the matrix's one-shot."""

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from tests.workers.failures.rig import Answer, Rig
from tests.workers.serving import prompt_of
from workers.engine import Sampling, generate
from workers.models import LoadedModel

TOKENS = 100
SEEDS = itertools.count(5000)


@pytest.fixture(scope="module", params=["catch-up", "overlap", "kv"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp(request.param), {"handoff": request.param}) as running:
        yield running
        running.check_books()


@pytest.mark.parametrize(("fault", "victim"), [("kill", "rld0"), ("kill", "md0"), ("stop", "rld0")])
def test_while_ids_are_on_their_way(tiny: LoadedModel, rig: Rig, fault: str, victim: str) -> None:
    """What the relay said to main decode is held, and with a kill lost."""
    ids = rig.ways["rld0", "md0"]
    ids.hold("control", "there", needle=b"token-ids")
    _check(tiny, rig, fault, victim, lambda _: ids.holds("control", "there", b"token-ids"))


def test_while_main_decode_has_begun_to_answer(tiny: LoadedModel, rig: Rig) -> None:
    # in `overlap` main decode overtakes a relay that is no slower only when that has been stopped
    _check(tiny, rig, "kill", "md0", lambda answer: answer.from_("md0") > 0, tokens=500)


def _check(tiny, rig, fault, victim, reached, tokens=TOKENS) -> None:  # type: ignore[no-untyped-def]
    prompt = prompt_of(100, seed=next(SEEDS))
    expected = generate(tiny, prompt, Sampling(max_tokens=tokens, ignore_eos=True))
    answer = Answer()

    async def test() -> None:
        try:
            asking = asyncio.create_task(rig.stream(answer, prompt, tokens))
            await rig.until(lambda: reached(answer), "the stage is reached")
            await rig.fault(fault, victim)
            for proxy in rig.ways.values():
                proxy.release()
            await asking
            if fault == "stop":
                await rig.noticed(victim)
        finally:
            await rig.heal()
            await rig.settled()

    rig.run(test())
    assert answer.error is None
    assert answer.ids == expected
    record = rig.record(answer.request_id)
    assert record["success"]
    assert record["pdd_unsettled"] == []
