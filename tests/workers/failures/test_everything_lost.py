"""When nobody is left: a named error in OpenAI's shape, soon; and when somebody comes back in time, the answer."""

import asyncio
import time

from tests.workers.failures.rig import WORKERS, Answer, Rig
from tests.workers.serving import prompt_of
from workers.engine import Sampling, generate
from workers.models import LoadedModel
from workers.wire.deadlines import Path as NetworkPath

TOKENS = 300


def test_everything_lost_is_a_named_error_within_a_deadline(rig: Rig) -> None:
    streamed, whole = Answer(), Answer()
    connect_s = NetworkPath(patience=0.1).connect_s

    async def test() -> float:
        asking = asyncio.create_task(rig.stream(streamed, prompt_of(100), 3000))
        await rig.until(lambda: len(streamed.ids) > 3, "the answer has begun")
        rig.ways["gw0", "p0"].hold("control", "there", needle=b"prefill")
        waiting = asyncio.create_task(rig.stream(whole, prompt_of(100, seed=1), 3000))
        await rig.until(lambda: rig.ways["gw0", "p0"].holds("control", "there", b"prefill"), "the second one waits")
        for worker in WORKERS:
            await rig.fault("kill", worker)
        lost = time.monotonic()
        await asyncio.gather(asking, waiting)
        took = time.monotonic() - lost
        refused = await rig.stream(Answer(), prompt_of(10), 5)
        assert refused.status == 503
        assert refused.error is not None
        assert refused.error["code"] == "no_worker"
        await rig.heal()
        await rig.settled()
        assert (await rig.stream(Answer(), prompt_of(10), 5)).error is None
        return took

    took = rig.run(test())
    assert whole.status == 502, "no token yet: the error has its own status"
    for answer in (streamed, whole):
        assert answer.error is not None
        assert answer.error["code"] == "worker_lost"
        assert "lost" in answer.error["message"]
        assert answer.error["type"] == "server_error"
    assert took < connect_s + 10, "the deadline, and what a busy machine adds"


def test_workers_that_are_back_in_time_finish_the_answer(tiny: LoadedModel, rig: Rig) -> None:
    prompt = prompt_of(200, seed=7)
    expected = generate(tiny, prompt, Sampling(max_tokens=TOKENS, ignore_eos=True))
    answer = Answer()

    async def test() -> None:
        asking = asyncio.create_task(rig.stream(answer, prompt, TOKENS))
        await rig.until(lambda: len(answer.ids) > 10, "the answer has begun")
        for proxy in rig.ways.values():
            proxy.reset()  # every connection of the cluster at once; all of them are dialled again
        await asking
        await rig.settled()

    rig.run(test())
    assert answer.error is None
    assert answer.ids == expected
    record = rig.record(answer.request_id)
    assert record["pdd_replays"] > 0
    assert [loss["how"] for loss in record["pdd_recovery"]].count("replay") > 0
