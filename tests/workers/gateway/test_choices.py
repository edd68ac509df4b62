"""Several choices side by side: pieces as they come, one failure for all, and an end that reaches every one."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.workers.serving import SlowWan, eventually, prompt_of, run
from workers.gateway.answers import CompletionAnswer, Piece
from workers.gateway.choices import side_by_side
from workers.gateway.generation import events
from workers.models import LoadedModel


class Stream:
    """A choice of so many pieces that fails after them, or not; knows how far it came and whether it was closed."""

    def __init__(self, index: int, count: int, failure: Exception | None = None) -> None:
        self.made = 0
        self.closed = False
        self._index, self._count, self._failure = index, count, failure

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        try:
            for number in range(self._count):
                await asyncio.sleep(0)
                self.made += 1
                yield Piece(self._index, str(number), [])
            if self._failure is not None:
                raise self._failure
        finally:
            self.closed = True


def test_all_pieces_of_all_choices_come_each_choice_in_order() -> None:
    async def test() -> None:
        streams = [Stream(index, 5 + index) for index in range(3)]
        pieces = [piece async for piece in side_by_side([stream.pieces() for stream in streams])]
        for index in range(3):
            assert [piece.text for piece in pieces if piece.index == index] == [str(n) for n in range(5 + index)]
        assert sorted(piece.index for piece in pieces[:6]) == [0, 0, 1, 1, 2, 2], "they take turns"
        assert all(stream.closed for stream in streams)

    run(test())


@pytest.mark.parametrize("count", [1, 3])
def test_a_failure_of_one_ends_all_whatever_it_is(count: int) -> None:
    async def test() -> None:
        streams = [Stream(0, 2, RuntimeError("broken")), *(Stream(index, 10**9) for index in range(1, count))]
        with pytest.raises(RuntimeError, match="broken"):
            async for _ in side_by_side([stream.pieces() for stream in streams]):
                pass
        assert all(stream.closed for stream in streams)

    run(test())


@pytest.mark.parametrize("count", [1, 3])
def test_a_reader_that_goes_closes_all_and_one_that_pauses_holds_all_back(count: int) -> None:
    async def test() -> None:
        streams = [Stream(index, 10**9) for index in range(count)]
        async with aclosing(side_by_side([stream.pieces() for stream in streams])) as pieces:
            await anext(pieces)
            for _ in range(200):
                await asyncio.sleep(0)
            assert all(stream.made <= 3 for stream in streams), "one waits, one is in the queue, one was read"
        assert all(stream.closed for stream in streams)

    run(test())


def test_when_every_worker_goes_a_streamed_answer_of_several_choices_ends_with_one_error(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    body = {"prompt": prompt_of(20), "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "stream": True, "n": 3}

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, extra={"gw0": {"PDDBED_PATIENCE": "0.05"}}) as lab:
            lines = []
            async with lab.http.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    if not lines:
                        for worker in lab.workers:
                            await worker.close()
                    if line:
                        lines.append(line)
            errors = [json.loads(line[6:])["error"] for line in lines if line.startswith('data: {"error"')]
            assert len(errors) == 1
            assert errors[0]["type"] == "server_error"
            assert lines[-1].startswith('data: {"error"'), "nothing comes behind it"
            gateway = lab.cluster.gateway
            await eventually(lambda: gateway.admission.running == 0, 5, "its places are free")
            await eventually(lambda: not gateway.dispatcher.live, 5, "all three are forgotten")

    run(test())


def test_a_fault_of_the_gateways_own_in_mid_stream_is_an_error_event_too(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> list[bytes]:
        rest = side_by_side([Stream(0, 2, RuntimeError("a bug")).pieces()])
        first = await anext(rest)
        return [event async for event in events(first, rest, CompletionAnswer("x", "tiny", 0), None)]

    *chunks, last = run(test())
    assert len(chunks) == 2
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"]) == ("internal_error", "server_error")
    assert "a bug" in caplog.text, "with its traceback in the log"
