"""Valid messages in any order, late, twice, about requests that are over or unknown: no worker breaks or leaks.

What a peer says once it is let in is well-formed and may still be nonsense: workers restart, messages cross, a stopped
worker speaks again. Each example is a new worker without its peers, fed by hand what its connections would bring.
"""

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workers.serving import eventually, prompt_of, run
from workers.engine import Sampling
from workers.environment import read_environment
from workers.local import Layout, Plan
from workers.models import LoadedModel
from workers.process import make
from workers.wire.kv_messages import KvBegin, KvWanted
from workers.wire.kv_receive import RefuseTransfer
from workers.wire.messages import (
    Cancel,
    Finish,
    HandOver,
    Message,
    Prefill,
    RequestSpec,
    SamplingSpec,
    StopRelay,
    TokenIds,
    Without,
)

PEERS = {"p0": "md0", "rld0": "p0", "md0": "rld0"}
names = st.sampled_from(["r1", "r2", "r3"])
counts = st.integers(0, 40)
ids = st.lists(st.integers(0, 300), max_size=6)  # some of them outside the vocabulary
reasons = st.sampled_from([None, "stop", "length"])


def spec(host: str, request: str, alone: bool, length: int, tokens: int) -> RequestSpec:
    return RequestSpec(
        id=request,
        gateway="gw0",
        prefill=host if alone else "p0",
        relay=None if alone else "rld0",
        main=None if alone else "md0",
        prompt=prompt_of(length),
        sampling=SamplingSpec(max_tokens=tokens, ignore_eos=True),
        deadline_s=20,
    )


@st.composite
def steps(draw: st.DrawFn, host: str) -> tuple[str, Any]:
    request = draw(names)
    made = spec(host, request, draw(st.booleans()), draw(st.integers(1, 40)), draw(st.integers(1, 20)))
    messages: list[Message] = [
        Prefill(spec=made),
        Cancel(request=request, reason="x"),
        Finish(request=request),
        HandOver(request=request, mode=draw(st.sampled_from(["one-shot", "auto", "catch-up", "overlap", "kv", "odd"]))),
        StopRelay(request=request),
        TokenIds(
            request=request,
            position=draw(counts),
            ids=draw(ids),
            stopped_ns=draw(st.none() | st.just(1)),
            finish_reason=draw(reasons),
            tail=draw(st.integers(0, 3)),
        ),
        Without(request=request, lost=draw(st.sampled_from(["p0", "rld0", "md0", "?"])), ids=draw(ids)),
        KvWanted(request=request, first_block=draw(counts), transfer=f"{request}.1"),
    ]
    kind = draw(st.sampled_from(["message", "message", "message", "begin", "kv", "end", "turn", "lost"]))
    if kind == "message":
        return kind, (draw(st.sampled_from(["gw0", PEERS[host]])), draw(st.sampled_from(messages)))
    if kind == "begin":
        return kind, KvBegin(
            transfer=f"{request}.{draw(counts)}",
            spec=made,
            first_block=draw(st.integers(0, 1)),
            tokens=len(made.prompt),
        )
    if kind == "end":
        return kind, (request, draw(st.integers(0, 300)), draw(reasons))
    return kind, request


async def feed(worker: Any, todo: list[tuple[str, Any]]) -> None:
    incoming: dict[str, Any] = {}
    for kind, what in todo:
        if kind == "message":
            worker.on_message(*what)
        elif kind == "begin" and hasattr(worker, "begin"):
            if len(what.spec.prompt) >= what.first_block * worker.block_size:  # else the wire refuses it
                with suppress(RefuseTransfer):
                    incoming[what.spec.id] = worker.begin(what)
        elif kind == "kv" and what in incoming:
            incoming[what].verified(1)
        elif kind == "end" and what[0] in incoming:
            transfer = incoming.pop(what[0])
            transfer.complete(what[1], what[2], 1, None)
        elif kind == "lost" and what in incoming:
            incoming.pop(what).failed("connection_lost", "cut")
        else:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("host", ["p0", "rld0", "md0"])
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_nothing_breaks_and_nothing_is_kept(
    tiny: LoadedModel, tmp_path: Path, host: str, caplog: pytest.LogCaptureFixture, data: st.DataObject
) -> None:
    todo = data.draw(st.lists(steps(host), max_size=14))
    caplog.clear()
    caplog.set_level(logging.ERROR)

    async def test() -> None:
        plan = Plan(Layout(kv_bytes=4 << 20), tmp_path, ("127.0.0.1", 0))
        worker: Any = make(read_environment(plan.environment(host)), tiny)
        worker.runner.start()
        try:
            await feed(worker, todo)
            for request in ("r1", "r2", "r3"):
                worker.on_message("gw0", Cancel(request=request, reason="enough"))
            await eventually(lambda: not worker.active, 10, "every request is over")
            await eventually(
                lambda: worker.pool.free_count + len(worker.cache) == worker.pool.num_blocks, 10, "all is given back"
            )
            assert worker.cache.policy.pinned == 0
            worker.cache.check_integrity()
            worker.pool.check_integrity(holders=[worker.cache.blocks])
        finally:
            await worker.close()
            for sock in plan.sockets.values():
                sock.close()

    run(test())
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not errors, [(record.getMessage(), record.exc_info) for record in errors]


@pytest.mark.parametrize("host", ["rld0", "md0"])
def test_what_is_said_of_a_hand_over_does_not_touch_a_request_that_is_served_alone(
    tiny: LoadedModel, tmp_path: Path, host: str
) -> None:
    async def test() -> None:
        plan = Plan(Layout(kv_bytes=4 << 20), tmp_path, ("127.0.0.1", 0))
        worker: Any = make(read_environment(plan.environment(host)), tiny)
        worker.runner.start()
        worker.on_message("gw0", Prefill(spec=spec(host, "r1", True, 20, 10)))
        for message in (
            HandOver(request="r1", mode="catch-up"),
            TokenIds(request="r1", position=0, ids=[1]),
            StopRelay(request="r1"),
            Without(request="r1", lost=PEERS[host], ids=[]),
        ):
            worker.on_message(PEERS[host], message)
        (active,) = worker.active.values()
        assert active.failure is None
        assert list(worker.active) == ["r1"], "it is still at work"
        await worker.close()
        for sock in plan.sockets.values():
            sock.close()

    run(test())


@pytest.mark.parametrize("token", [258, 2**32 - 1])
def test_a_first_token_that_no_model_has_ends_its_request_and_no_other(
    tiny: LoadedModel, tmp_path: Path, token: int
) -> None:
    async def test() -> None:
        plan = Plan(Layout(kv_bytes=4 << 20), tmp_path, ("127.0.0.1", 0))
        worker: Any = make(read_environment(plan.environment("md0")), tiny)
        worker.runner.start()
        other = worker.runner.new_sequence("other", prompt_of(10), 10, Sampling(max_tokens=500, ignore_eos=True))
        await worker.runner.prefill(other)
        decoding = asyncio.create_task(_all(worker.runner.decode(other)))
        begin = KvBegin(transfer="r1.1", spec=spec("md0", "r1", False, 10, 20), first_block=0, tokens=10)
        worker.begin(begin).complete(token, None, 1, None)
        await eventually(lambda: not worker.active, 5, "it is over")
        assert len(await decoding) == 499
        await worker.close()

    run(test())


async def _all(tokens: Any) -> list[Any]:
    return [token async for token in tokens]
