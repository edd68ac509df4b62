"""Who runs, who waits, who is refused; and the end of a gateway, which is nobody's broken answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.serving import SlowWan, eventually, prompt_of, run
from workers.engine import Sampling, generate
from workers.gateway.admission import Admission, Draining, Limits, Overloaded
from workers.models import LoadedModel


@given(st.integers(1, 4), st.integers(0, 4), st.lists(st.integers(-6, 4), max_size=40))
def test_no_more_run_or_wait_than_may_and_turns_are_in_order(running: int, waiting: int, moves: list[int]) -> None:
    """A move is the arrival of so many together, or (below zero) the end of one of those that are here."""

    async def test() -> None:
        admission = Admission(Limits(running, waiting))
        here: list[Any] = []
        for move in moves:
            if move > 0:
                room = running + waiting - len(here)
                if move > room:
                    with pytest.raises(Overloaded):
                        admission.enter(move)
                else:
                    here += admission.enter(move)
            elif here and move < 0:
                ticket = here.pop(-move % len(here))
                ticket.release()
                ticket.release()
            turns = [ticket.running for ticket in here]
            assert turns == sorted(turns, reverse=True), "who came first has its turn first"
            assert turns.count(True) == admission.running == min(running, len(here))
            assert admission.waiting == len(here) - admission.running
        for ticket in here:
            ticket.release()
        await asyncio.wait_for(admission.idle(), 1)

    asyncio.run(test())


def test_retry_after_follows_the_pace_of_the_latest_ends() -> None:
    async def test() -> None:
        now = 0.0
        admission = Admission(Limits(1, 0), clock=lambda: now)
        assert admission.retry_after_s(1) == 1, "nothing is known yet"
        for _ in range(5):
            (ticket,) = admission.enter()
            now += 3.0
            ticket.release()
        assert admission.retry_after_s(1) == 3
        assert admission.retry_after_s(10) == 24
        assert admission.retry_after_s(10_000) == 60

    asyncio.run(test())


def test_a_draining_gateway_takes_nothing_new_and_keeps_what_waits() -> None:
    async def test() -> None:
        admission = Admission(Limits(1, 1))
        first, second = admission.enter(2)
        admission.drain()
        with pytest.raises(Draining):
            admission.enter()
        first.release()
        await asyncio.wait_for(second.admitted(), 1)
        assert not admission._idle.is_set()
        second.release()
        await asyncio.wait_for(admission.idle(), 1)

    asyncio.run(test())


LONG = {"prompt": prompt_of(30), "temperature": 0, "ignore_eos": True, "stream": True}


@asynccontextmanager
async def streaming(lab: SlowWan, tokens: int = 3000) -> AsyncIterator[AsyncIterator[str]]:
    """A long answer that has begun: its lines."""
    async with lab.http.stream("POST", "/v1/completions", json=LONG | {"max_tokens": tokens}) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        yield lines


def test_what_fits_nowhere_is_refused_with_a_retry_after_and_the_rest_gets_its_turn(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    expected = generate(tiny, prompt_of(20), Sampling(max_tokens=5))

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={"max_running": 1, "max_waiting": 2}) as lab:
            admission = lab.cluster.gateway.admission
            async with streaming(lab):
                waiting = [asyncio.create_task(lab.complete(prompt_of(20), 5)) for _ in range(2)]
                await eventually(lambda: admission.waiting == 2, 5, "both wait")
                refused = await lab.http.post("/v1/completions", json={"prompt": "x"})
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                error = refused.json()["error"]
                assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
                assert "1 requests are running and 2 are waiting" in error["message"]
                metrics = (await lab.http.get("/metrics")).text
                assert "pddbed_num_requests_running 1.0\npddbed" not in metrics
                assert "pddbed_num_requests_running 1" in metrics
                assert "pddbed_num_requests_waiting 2" in metrics
                assert "pddbed_requests_refused_total 1" in metrics
                assert not any(task.done() for task in waiting)
            answers = await asyncio.gather(*waiting)
            assert [answer["pdd"]["token_ids"] for answer in answers] == [expected] * 2
            record = answers[0]["pdd"]["record"]
            assert 0 < record["pdd_gateway_queue_ms"] <= record["ttft"] * 1000, "the client waited, so it counts"
            await lab.check_released()

    run(test())


def test_one_request_for_more_choices_than_there_is_room_is_refused_whole(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={"max_running": 2, "max_waiting": 1}) as lab:
            response = await lab.http.post("/v1/completions", json={"prompt": "x", "n": 4, "max_tokens": 2})
            assert response.status_code == 429
            assert lab.cluster.gateway.admission.running == 0
            answer = await lab.complete("x", 2, n=3)
            assert len(answer["choices"]) == 3

    run(test())


def test_a_client_that_leaves_while_it_waits_gives_its_place_to_the_next(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={"max_running": 1, "max_waiting": 1}) as lab:
            admission = lab.cluster.gateway.admission
            async with streaming(lab):
                leaver = asyncio.create_task(lab.complete("x", 2))
                await eventually(lambda: admission.waiting == 1, 5, "it waits")
                leaver.cancel()
                await eventually(lambda: admission.waiting == 0, 5, "its place is free")
                stayer = asyncio.create_task(lab.complete("y", 2))
                await eventually(lambda: admission.waiting == 1, 5, "the next waits")
            assert (await stayer)["usage"]["completion_tokens"] == 2
            await eventually(lambda: admission.running == 0, 5, "no place is lost")

    run(test())


def test_waiting_for_ones_turn_has_a_deadline_too(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.gateway.admission.WAIT_S", 0.2)

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={"max_running": 1}) as lab:
            async with streaming(lab):
                response = await lab.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
                assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_deadline")
                assert response.headers["retry-after"]
                assert lab.cluster.gateway.admission.waiting == 0

    run(test())


def test_a_gateway_that_ends_finishes_its_streams_and_refuses_new_requests(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={"drain": 60 * 10**9}) as lab:
            gateway = lab.cluster.gateway
            async with streaming(lab, 600) as lines:
                closing = asyncio.create_task(gateway.close())
                await eventually(lambda: gateway.admission.draining, 5, "it drains")
                health = await lab.http.get("/health")
                assert (health.status_code, health.json()["status"]) == (503, "draining")
                refused = await lab.http.post("/v1/completions", json={"prompt": "x"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
                assert refused.headers["retry-after"]
                rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            tokens = [token for line in rest[:-1] for token in json.loads(line[6:])["pdd"]["token_ids"]]
            assert len(tokens) == 600 - 1
            await closing
            with pytest.raises(httpx.HTTPError):
                await lab.http.get("/health")

    run(test())


def test_a_drain_has_an_end(tiny: LoadedModel, tmp_path: Path) -> None:
    """The answer cannot end: the way to its decoders stands still."""

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={"drain": 10**8}) as lab:
            lab.wan.pause()
            lab.fabric.pause()
            body = {"prompt": "x", "max_tokens": 5}
            asking = asyncio.create_task(lab.http.post("/v1/completions", json=body))
            await eventually(lambda: bool(lab.p0.active), 5, "prefill has it")
            await asyncio.wait_for(lab.cluster.gateway.close(), 15)
            response = await asking
            assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
            await eventually(lambda: not any(worker.active for worker in lab.workers), 5, "the workers drop it")

    run(test())
