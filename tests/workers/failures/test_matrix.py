"""Every fault, of every worker, at every stage of a request: the answer is the control's, and nothing is left behind.

The processes are real and so are the faults; a stage is reached when what belongs to it waits in a proxy or has come to
the client, never after some time.
"""

import asyncio
import itertools

import pytest

from tests.workers.failures.rig import WORKERS, Answer, Rig
from tests.workers.serving import prompt_of
from workers.engine import Sampling, generate
from workers.models import LoadedModel

PROMPT, TOKENS = 200, 100
STAGES = ("before-prefill", "transfer", "relay", "hand-over", "main-decode")
OVER = {("p0", "hand-over"), ("p0", "main-decode"), ("rld0", "main-decode")}  # that worker's part is done by then
SILENT = ("stop", "half-open")  # faults that only a deadline tells: what does not need the worker never notices
NEEDED = {
    *((worker, stage) for worker in ("p0", "rld0") for stage in ("before-prefill", "transfer")),
    ("rld0", "relay"),
    ("md0", "hand-over"),
    ("md0", "main-decode"),
}

SEEDS = itertools.count(1000)


def arm(rig: Rig, stage: str) -> None:
    """Hold back what would take the request beyond the stage."""
    if stage == "before-prefill":
        rig.ways["gw0", "p0"].hold("control", "there", needle=b"prefill")
    elif stage == "transfer":
        for target in ("rld0", "md0"):
            rig.ways["p0", target].hold("kv", "there", after_bytes=100_000)
    elif stage == "relay":
        rig.ways["p0", "md0"].hold("kv", "there", after_bytes=100_000)
    elif stage == "hand-over":
        rig.ways["rld0", "md0"].hold("control", "there", needle=b"token-ids")


def reached(rig: Rig, stage: str, answer: Answer) -> bool:
    if stage == "before-prefill":
        return rig.ways["gw0", "p0"].holds("control", "there", b"prefill")
    if stage == "transfer":
        return all(rig.ways["p0", target].holds("kv", "there") for target in ("rld0", "md0"))
    if stage == "relay":
        return rig.ways["p0", "md0"].holds("kv", "there") and answer.from_("rld0") > 3
    if stage == "hand-over":
        return rig.ways["rld0", "md0"].holds("control", "there", b"token-ids")
    return answer.from_("md0") > 3


CASES = [
    *itertools.product(["kill"], WORKERS, STAGES),
    *itertools.product(["cut"], WORKERS, ["transfer", "hand-over"]),
    *itertools.product(["stop"], WORKERS, STAGES[1:]),
    *itertools.product(["half-open"], WORKERS, ["transfer", "main-decode"]),
]


@pytest.mark.parametrize(("fault", "victim", "stage"), CASES)
def test_the_answer_is_the_controls(tiny: LoadedModel, rig: Rig, fault: str, victim: str, stage: str) -> None:
    prompt = prompt_of(PROMPT, seed=next(SEEDS))
    tokens = 5 * TOKENS if stage == "relay" else TOKENS  # the relay must not be done before the fault comes
    expected = generate(tiny, prompt, Sampling(max_tokens=tokens, ignore_eos=True))

    async def test() -> Answer:
        answer = Answer()
        arm(rig, stage)
        asking = asyncio.create_task(rig.stream(answer, prompt, tokens))
        try:
            await rig.until(lambda: reached(rig, stage, answer), f"the request reaches {stage}")
            await rig.fault(fault, victim)
            for way, proxy in rig.ways.items():
                if victim not in way or fault in ("kill", "stop"):
                    proxy.release()
            await asking
            if fault in SILENT:
                await rig.noticed(victim)
            return answer
        finally:
            asking.cancel()
            await rig.heal()
            await rig.settled()

    answer = rig.run(test())
    assert answer.error is None
    assert answer.ids == expected
    record = rig.record(answer.request_id)
    assert record["success"]
    assert record["pdd_unsettled"] == []
    assert record["output_len"] == tokens
    if (fault, victim, stage) == ("stop", "p0", "transfer"):
        return  # its kernel may have taken all KV before
    if (victim, stage) in NEEDED if fault in SILENT else (victim, stage) not in OVER:
        assert victim in [loss["lost"] for loss in record["pdd_recovery"]], record["pdd_recovery"]
