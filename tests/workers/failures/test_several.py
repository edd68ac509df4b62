"""Two workers of each role: one is lost, the other one of its role goes on."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.failures.rig import Answer, Rig
from tests.workers.serving import prompt_of
from workers.engine import Sampling, generate
from workers.models import LoadedModel

HOSTS = (
    ("gw0", "gateway", "main"),
    *(
        (f"{name}{number}", role, "main")
        for name, role in (("p", "prefill"), ("rld", "relay-decode"))
        for number in (0, 1)
    ),
    *((f"md{number}", "main-decode", "remote") for number in (0, 1)),
)
TOKENS = 120


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """One for each test: of workers with empty caches the first by name gets a request."""
    with Rig(tmp_path, {"handoff": "one-shot"}, HOSTS, patience=0.5) as running:
        yield running
        running.check_books()


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="plain"),
        pytest.param({"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}, id="penalties"),
    ],
)
def test_another_main_decode_replays(tiny: LoadedModel, rig: Rig, fields: dict[str, float]) -> None:
    """With penalties, for which what is answered already is of the answer, though of the new attempt's prompt."""
    answer, record = _answer(tiny, rig, 1, lambda answer: answer.from_("md0") > 3, "md0", **fields)
    assert answer.instances[-1] == "md1"
    (loss,) = record["pdd_recovery"]
    assert (loss["lost"], loss["how"]) == ("md0", "replay")
    assert "md1" in loss["by"]


def test_another_prefill_takes_the_request_whose_kv_nobody_has(tiny: LoadedModel, rig: Rig) -> None:
    way = rig.ways["gw0", "p0"]
    way.hold("control", "there", needle=b"prefill")
    answer, record = _answer(tiny, rig, 2, lambda _: way.holds("control", "there", b"prefill"), "p0")
    (loss,) = record["pdd_recovery"]
    assert (loss["lost"], loss["how"], loss["by"][0]) == ("p0", "replay", "p1")
    assert record["pdd_pipeline"] == "p-rld-md"
    assert set(answer.instances) <= {"rld0", "rld1", "md0", "md1"}


def test_main_decode_goes_on_when_its_relay_is_lost(tiny: LoadedModel, rig: Rig) -> None:
    way = rig.ways["p0", "md0"]
    way.hold("kv", "there", after_bytes=50_000)

    def relayed(answer: Answer) -> bool:
        return way.holds("kv", "there") and answer.from_("rld0") > 3

    answer, record = _answer(tiny, rig, 3, relayed, "rld0")
    (loss,) = record["pdd_recovery"]
    assert (loss["lost"], loss["how"], loss["by"]) == ("rld0", "goes-on", ["md0"])
    assert answer.instances[-1] == "md0"
    assert record["pdd_replays"] == 0


def test_requests_go_around_a_worker_that_is_away(tiny: LoadedModel, rig: Rig) -> None:
    async def test() -> None:
        for victim in ("p0", "rld0", "md0"):
            await rig.fault("cut", victim)
        for victim in ("p0", "rld0", "md0"):
            await rig.noticed(victim)
        prompt = prompt_of(150, seed=77)
        answer = await rig.stream(Answer(), prompt, 60)
        assert answer.ids == generate(tiny, prompt, Sampling(max_tokens=60, ignore_eos=True))
        record = rig.record(answer.request_id)
        assert (record["pdd_prefill"], record["pdd_relay"], record["pdd_main"]) == ("p1", "rld1", "md1")
        assert record["pdd_recovery"] == []
        for victim in ("p1", "md1"):
            await rig.fault("cut", victim)
        for victim in ("p1", "md1"):
            await rig.noticed(victim)
        prompt = prompt_of(150, seed=78)
        answer = await rig.stream(Answer(), prompt, 60)
        assert answer.ids == generate(tiny, prompt, Sampling(max_tokens=60, ignore_eos=True))
        record = rig.record(answer.request_id)
        assert (record["pdd_pipeline"], record["pdd_prefill"]) == ("rld", "rld1"), "alone, the only one left"
        assert "no prefill worker is connected" in record["pdd_route_reason"]
        await rig.heal()
        await rig.settled()

    rig.run(test())


def _answer(tiny: LoadedModel, rig: Rig, seed: int, reached, victim: str, **fields: float):  # type: ignore[no-untyped-def]
    prompt = prompt_of(150, seed=seed)
    expected = generate(tiny, prompt, Sampling(max_tokens=TOKENS, ignore_eos=True, **fields))  # type: ignore[arg-type]
    answer = Answer()

    async def test() -> None:
        try:
            asking = asyncio.create_task(rig.stream(answer, prompt, TOKENS, **fields))
            await rig.until(lambda: reached(answer), "the stage is reached")
            await rig.fault("kill", victim)
            for proxy in rig.ways.values():
                proxy.release()
            await asking
        finally:
            await rig.heal()
            await rig.settled()

    rig.run(test())
    assert answer.error is None
    assert answer.ids == expected
    record = rig.record(answer.request_id)
    assert record["pdd_unsettled"] == []
    return answer, record
