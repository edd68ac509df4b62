"""The client against servers that are no pddbed: what counts as a token, as a failure, and as an address."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from experiments.bench.client import Api, ApiError, Served, base_of
from experiments.bench.outcome import Outcome

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def chunk(text: str | None, finish: str | None = None, **more: Any) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": finish}]
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": choices, **more}).encode() + b"\n\n"


def plain(status: str, body: Any) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data


@asynccontextmanager
async def serving(*writes: bytes | float) -> AsyncIterator[str]:
    """A server that answers every request with these bytes, one write after the other, and closes. A number: seconds
    in which it writes nothing.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0)
        await reader.readexactly(length)
        for data in writes:
            if isinstance(data, float):
                await asyncio.sleep(data)
                continue
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def ask(*writes: bytes | float) -> Outcome:
    async def once() -> Outcome:
        outcome = Outcome(0, 5)
        async with serving(*writes) as url, Api(url, direct=True) as api:
            await api.answer(b"{}", outcome)
        return outcome

    return asyncio.run(asyncio.wait_for(once(), 60))


def served(name: str | None, *writes: bytes) -> Served:
    async def once() -> Served:
        async with serving(*writes) as url, Api(url, direct=True) as api:
            return await api.served(name)

    return asyncio.run(asyncio.wait_for(once(), 60))


def test_each_chunk_with_a_token_counts_and_the_servers_own_count_holds() -> None:
    usage = chunk(None, usage={"prompt_tokens": 5, "completion_tokens": 7})
    outcome = ask(CHUNKED, chunk("a"), chunk(""), chunk("bc"), chunk("", "length"), usage, b"data: [DONE]\n\n")
    assert outcome.success
    assert len(outcome.chunk_ns) == 3, "an empty text is half a character, an empty last chunk only ends the answer"
    assert outcome.output_tokens == 7
    assert outcome.finish_reason == "length"
    row = outcome.row(outcome.start_ns)
    assert len(row["itl"]) == 2
    assert row["tpot"] == pytest.approx((row["e2el"] - row["ttft"]) / 6)
    assert "pdd_pipeline" not in row


def raw(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


WAIT_S = 0.2
FIRST_SIGNS = {
    "a role": raw({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]}),
    "a role with an empty text": raw(
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    ),
    "an empty text": chunk(""),
    "no text": raw({"choices": [{"index": 0, "text": None, "finish_reason": None}]}),
    "an empty text and an empty finish reason": chunk("", ""),
    "an empty text and no ids": raw({"choices": [{"index": 0, "text": "", "token_ids": []}]}),
    "ids of the prompt": raw({"choices": [{"index": 0, "text": "", "prompt_token_ids": [1, 2], "token_ids": None}]}),
    "usage of no token": chunk("", usage={"prompt_tokens": 5, "completion_tokens": 0}),
    "usage alone": raw({"usage": {"prompt_tokens": 5, "completion_tokens": 0}}),
    "no choice": raw({"choices": [], "prompt_filter_results": []}),
    "choices of null": raw({"choices": None}),
    "our own piece without a token": chunk("", pdd={}),
    "a comment": b": keep-alive\n\n",
    "an empty event": b"data:\n\n",
    "another field": b"event: ping\nid: 7\nretry: 10\n\n",
}


@pytest.mark.parametrize("sign", FIRST_SIGNS)
def test_the_first_token_is_the_first_chunk_that_has_one(sign: str) -> None:
    usage = chunk(None, usage={"prompt_tokens": 5, "completion_tokens": 3})
    signs = FIRST_SIGNS[sign]
    outcome = ask(CHUNKED, signs, signs, WAIT_S, chunk("a"), chunk("b"), WAIT_S, chunk("c", "length"), usage)
    row = outcome.row(outcome.start_ns)
    assert outcome.success, outcome.message
    assert row["ttft"] >= WAIT_S, "not when the server showed that it lives"
    assert len(row["itl"]) == 2
    assert row["tpot"] == pytest.approx(sum(row["itl"]) / 2)
    assert row["e2el"] == pytest.approx(row["ttft"] + sum(row["itl"]))
    assert row["output_len"] == 3


def test_a_token_without_text_is_one_where_its_id_or_a_running_count_says_so() -> None:
    ids = [
        raw({"choices": [{"index": 0, "text": text, "token_ids": found}]}) for text, found in (("", [9]), ("é", [8]))
    ]
    assert len(ask(CHUNKED, *ids, chunk("", "stop")).chunk_ns) == 2
    running = [
        chunk("", usage={"prompt_tokens": 5, "completion_tokens": 0}),
        chunk("", usage={"prompt_tokens": 5, "completion_tokens": 1}),
        chunk("é", usage={"prompt_tokens": 5, "completion_tokens": 2}),
        chunk("abc", "length", usage={"prompt_tokens": 5, "completion_tokens": 6}),
    ]
    outcome = ask(CHUNKED, *running)
    assert (len(outcome.chunk_ns), outcome.tokens, outcome.output_tokens) == (3, 6, 6)


def test_signs_of_life_between_tokens_are_no_tokens_where_the_server_counts_fewer() -> None:
    usage = chunk(None, usage={"prompt_tokens": 5, "completion_tokens": 2})
    outcome = ask(CHUNKED, chunk("a"), chunk(""), chunk(""), chunk("b"), chunk("", "stop"), usage)
    assert (len(outcome.chunk_ns), outcome.output_tokens) == (2, 2)


def test_an_end_token_without_text_takes_its_time() -> None:
    usage = chunk(None, usage={"prompt_tokens": 5, "completion_tokens": 2})
    outcome = ask(CHUNKED, chunk("a"), WAIT_S, chunk("", "stop"), usage)
    (gap,) = outcome.row(0)["itl"]
    assert outcome.row(0)["tpot"] == pytest.approx(gap), "e2el without ttft, over the tokens after the first"


def test_chunks_of_several_tokens_share_their_time_by_the_servers_count() -> None:
    usage = chunk(None, usage={"prompt_tokens": 5, "completion_tokens": 9})
    outcome = ask(CHUNKED, chunk("abc"), WAIT_S, chunk("def"), WAIT_S, chunk("ghi", "length"), usage)
    row = outcome.row(0)
    assert row["tpot"] == pytest.approx(sum(row["itl"]) / 8)
    assert len(row["itl"]) == 2, "a gap lies between chunks, as vllm bench serve has it"


def test_an_answer_of_one_token_has_no_time_per_token_and_no_gap() -> None:
    for last in (chunk(None, usage={"prompt_tokens": 5, "completion_tokens": 1}), b"data: [DONE]\n\n"):
        outcome = ask(CHUNKED, chunk(""), chunk("a", "length"), last)
        row = outcome.row(outcome.start_ns)
        assert (row["output_len"], row["tpot"], row["itl"], row["e2el"]) == (1, None, [], row["ttft"])


def test_a_last_chunk_that_no_line_end_follows_counts() -> None:
    assert ask(CHUNKED, chunk("a"), chunk("b", "stop").rstrip()).tokens == 2


def test_a_server_that_counts_nothing_has_a_token_a_chunk() -> None:
    outcome = ask(CHUNKED, chunk("a"), chunk("b", "stop"), b"data: [DONE]\n\n")
    assert (outcome.success, outcome.output_tokens) == (True, 2)


def test_events_may_come_in_any_pieces_and_with_comments() -> None:
    stream = b": ping\r\n\r\n" + chunk("a").replace(b"\n\n", b"\r\n\r\n") + chunk("b", "stop") + b"data:[DONE]\n\n"
    outcome = ask(CHUNKED, *(stream[at : at + 7] for at in range(0, len(stream), 7)))
    assert (outcome.success, outcome.tokens) == (True, 2)


def test_a_finish_reason_ends_an_answer_without_done() -> None:
    assert ask(CHUNKED, chunk("a", "stop")).success


OPENAI_ERROR = {"error": {"message": "no room", "type": "server_error", "code": "overloaded"}}


@pytest.mark.parametrize(
    ("writes", "reason", "message"),
    [
        ([plain("429 Too Many Requests", OPENAI_ERROR)], "429 overloaded", "no room"),
        ([plain("502 Bad Gateway", b"<html>nginx</html>")], "HTTP 502", "<html>nginx</html>"),
        ([plain("500 Oops", {"error": "text"})], "500 error", "text"),
        ([CHUNKED, chunk("a"), b"data: " + json.dumps(OPENAI_ERROR).encode() + b"\n\n"], "overloaded", "no room"),
        ([CHUNKED, chunk("a")], "broke off", "the connection ended before the answer did"),
        ([CHUNKED, b"data: [DONE]\n\n"], "broke off", "the connection ended before the answer did"),
        ([CHUNKED, chunk("", "stop"), b"data: [DONE]\n\n"], "no token", "an answer without a token"),
        ([CHUNKED, b"data: {]\n\n"], "not OpenAI's", "an event that is none of OpenAI's"),
        ([CHUNKED, b'data: {"choices": 3}\n\n'], "not OpenAI's", "an event that is none of OpenAI's"),
        ([CHUNKED, b"data: 7\n\n"], "not OpenAI's", "an event that is none of OpenAI's"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n", chunk("a")], "connection lost", ""),
        ([b""], "connection lost", ""),
    ],
)
def test_a_failure_has_a_reason_that_can_be_counted(writes: Sequence[bytes], reason: str, message: str) -> None:
    outcome = ask(*writes)
    assert not outcome.success
    assert outcome.reason == reason
    assert message in outcome.message
    assert outcome.row(outcome.start_ns)["pdd_failure"] == reason


def test_nobody_there_is_a_failure_of_its_own() -> None:
    async def once() -> tuple[Outcome, bool]:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        outcome = Outcome(0, 5)
        async with Api(f"http://127.0.0.1:{port}", direct=True) as api:
            await api.answer(b"{}", outcome)
            return outcome, await api.is_there()

    outcome, there = asyncio.run(once())
    assert (outcome.reason, there) == ("cannot connect", False)


MODELS = plain("200 OK", {"data": [{"id": "one", "max_model_len": 4096}, {"id": "two"}]})


def test_the_first_model_is_taken_or_the_one_that_is_named() -> None:
    assert served(None, MODELS) == Served("one", 4096)
    assert served("two", MODELS) == Served("two", None)
    with pytest.raises(ApiError, match=r"serves one, two, not three$"):
        served("three", MODELS)


def test_a_server_without_a_list_of_models_is_used_when_the_model_is_named() -> None:
    assert served("mine", plain("404 Not Found", b"")) == Served("mine", None)
    with pytest.raises(ApiError, match="answered with status 404 and no list of models"):
        served(None, plain("404 Not Found", b""))


@pytest.mark.parametrize("body", [b"hello", b"[]", b'{"data": 3}', b'{"data": ["x"]}', b"null"])
def test_a_server_of_another_kind_is_told(body: bytes) -> None:
    with pytest.raises(ApiError, match="is it an OpenAI-compatible server"):
        served(None, plain("200 OK", body))


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1", "http://[::bad", "http://127.0.0.1:99999"])
def test_a_wrong_address_is_told(url: str) -> None:
    async def once() -> None:
        async with Api(url, direct=True) as api:
            await api.served(None)

    # one sentence, whichever layer finds out
    with pytest.raises(ApiError, match="is not an address of an API"):
        asyncio.run(once())


def test_an_address_may_be_given_with_or_without_v1() -> None:
    assert base_of("http://h:1/v1/") == base_of("http://h:1/v1") == base_of("http://h:1/") == "http://h:1"
