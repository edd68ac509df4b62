"""The HTTP interface over a real cluster in this process: OpenAI's shapes for answers, and for every bad request."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workers.serving import Served, SlowWan, eventually, prompt_of, run
from workers.engine import Sampling, generate
from workers.models import LoadedModel

PROMPT = prompt_of(40)


def test_a_completion_streams_text_and_says_who_made_each_token(tiny: LoadedModel, lab: Served) -> None:
    expected = generate(tiny, PROMPT, Sampling(max_tokens=30))
    chunks = lab.events("/v1/completions", {"prompt": PROMPT, "max_tokens": 30, "temperature": 0})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == tiny.tokenizer.decode(expected)
    assert [token for chunk in chunks for token in chunk["pdd"]["token_ids"]] == expected
    assert chunks[0]["pdd"]["instance"] == "rld0"
    assert chunks[0]["pdd"]["position"] == 40
    assert chunks[-1]["pdd"]["instance"] == "md0"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    record = chunks[-1]["pdd"]["record"]
    assert {row["name"] for row in record["pdd_spans"]} >= {"prefill", "fabric-transfer", "wan-transfer", "main-decode"}
    assert all("record" not in chunk["pdd"] for chunk in chunks[:-1])


def test_a_chat_streams_deltas_with_the_role_first_and_usage_last(tiny: LoadedModel, lab: Served) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "!"}]}]
    ids = tiny.tokenizer.apply_chat_template([{"role": "user", "content": "Hello!"}])
    expected = tiny.tokenizer.decode(generate(tiny, ids, Sampling(max_tokens=20)))
    body = {"messages": messages, "max_completion_tokens": 20, "temperature": 0}
    chunks = lab.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    *chunks, counts = chunks
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected
    assert counts["choices"] == []
    assert counts["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": 20,
        "total_tokens": len(ids) + 20,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    whole = lab.post("/v1/chat/completions", body).json()
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": expected, "refusal": None}
    assert whole["usage"] == counts["usage"] | {"prompt_tokens_details": {"cached_tokens": len(ids) - 1}}
    assert whole["object"] == "chat.completion"


def test_a_stop_string_ends_the_answer_before_it_and_the_workers_stop(tiny: LoadedModel, lab: Served) -> None:
    text = tiny.tokenizer.decode(generate(tiny, PROMPT, Sampling(max_tokens=60)))
    stop = text[30:33]
    body = {"prompt": PROMPT, "max_tokens": 3000, "temperature": 0, "stop": stop, "ignore_eos": True}
    whole = lab.post("/v1/completions", body).json()
    assert whole["choices"][0]["text"] == text[: text.index(stop)]
    assert whole["choices"][0]["finish_reason"] == "stop"
    chunks = lab.events("/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert whole["pdd"]["record"]["success"] is True


def test_stop_token_ids_end_the_answer(tiny: LoadedModel, lab: Served) -> None:
    expected = generate(tiny, PROMPT, Sampling(max_tokens=60))
    whole = lab.post(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stop_token_ids": [expected[20]]}
    ).json()
    assert whole["pdd"]["token_ids"] == expected[: expected.index(expected[20]) + 1]
    assert whole["choices"][0]["finish_reason"] == "stop"


def test_models_and_health_and_metrics(lab: Served) -> None:
    models = lab.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert lab.get("/v1/models/tiny").json()["id"] == "tiny"
    assert lab.get("/v1/models/nope").status_code == 404
    assert lab.get("/health").json() == {"status": "ok", "pipeline": "p-rld-md", "workers": ["p0", "rld0", "md0"]}
    assert 'pddbed_worker_up{instance="md0"} 1' in lab.get("/metrics").text
    assert lab.post("/v1/completions", {"prompt": prompt_of(40, seed=9), "max_tokens": 2}).status_code == 200
    kv = 'pddbed_wire_bytes_total{class="kv",direction="sent",instance="p0",peer="md0"}'
    lab.wait_for(lambda: kv in lab.get("/metrics").text, "prefill's next status, a second later at most")


BAD = [
    ("not-json", b"{", 400, None),
    ("nothing", b"", 400, None),
    ("invalid-utf8", b'{"prompt": "\xff"}', 400, None),
    ("lone-surrogate", b'{"prompt": "\\ud800"}', 400, None),
    ("nan", b'{"prompt": "x", "temperature": NaN}', 400, None),
    ("deep", b"[" * 100_000, 400, None),
    ("not-an-object", b"[1]", 400, None),
    ("no-prompt", b"{}", 400, "prompt"),
    ("empty-prompt", b'{"prompt": []}', 400, "prompt"),
    ("too-many-prompts", b'{"prompt": [' + b'"a",' * 128 + b'"b"]}', 400, "prompt"),
    ("prompts-mixed", b'{"prompt": ["a", [1], 5]}', 400, "prompt[2]"),
    ("prompt-object", b'{"prompt": {"text": "x"}}', 400, "prompt"),
    ("prompt-bools", b'{"prompt": [[true]]}', 400, "prompt[0][0]"),
    ("empty-among-prompts", b'{"prompt": ["a", []]}', 400, "prompt"),
    ("mixed-prompt", b'{"prompt": [1, "b"]}', 400, "prompt[1]"),
    ("token-outside", b'{"prompt": [99999]}', 400, "prompt"),
    ("token-negative", b'{"prompt": [-1]}', 400, "prompt"),
    ("token-huge", b'{"prompt": [1e40]}', 400, "prompt[0]"),
    ("over-long", b'{"prompt": "' + b"x" * 5000 + b'"}', 400, "prompt"),
    ("too-many-tokens", b'{"prompt": "x", "max_tokens": 5000}', 400, "max_tokens"),
    ("no-tokens", b'{"prompt": "x", "max_tokens": 0}', 400, "max_tokens"),
    ("negative-tokens", b'{"prompt": "x", "max_tokens": -3}', 400, "max_tokens"),
    ("fractional-tokens", b'{"prompt": "x", "max_tokens": 2.5}', 400, "max_tokens"),
    ("huge-tokens", b'{"prompt": "x", "max_tokens": 99999999999999999999}', 400, "max_tokens"),
    ("unknown-model", b'{"prompt": "x", "model": "gpt-5"}', 404, "model"),
    ("negative-temperature", b'{"prompt": "x", "temperature": -1}', 400, "temperature"),
    ("absurd-temperature", b'{"prompt": "x", "temperature": 1e300}', 400, "temperature"),
    ("zero-top-p", b'{"prompt": "x", "top_p": 0}', 400, "top_p"),
    ("empty-stop", b'{"prompt": "x", "stop": ""}', 400, "stop"),
    ("stop-number", b'{"prompt": "x", "stop": 5}', 400, "stop"),
    ("stream-word", b'{"prompt": "x", "stream": "yes"}', 400, "stream"),
    ("no-answers", b'{"prompt": "x", "n": 0}', 400, "n"),
    ("too-many-answers", b'{"prompt": "x", "n": 129}', 400, "n"),
    ("too-many-choices", b'{"prompt": ["x", "y"], "n": 65}', 400, "n"),
    ("best-of", b'{"prompt": "x", "best_of": 2}', 400, "best_of"),
    ("logprobs-true", b'{"prompt": "x", "logprobs": true}', 400, "logprobs"),
    ("logprobs-negative", b'{"prompt": "x", "logprobs": -1}', 400, "logprobs"),
    ("logprobs-many", b'{"prompt": "x", "logprobs": 21}', 400, "logprobs"),
    ("echo-logprobs", b'{"prompt": "x", "logprobs": 1, "echo": true}', 400, "echo"),
    ("stream-options-alone", b'{"prompt": "x", "stream_options": {"include_usage": true}}', 400, "stream_options"),
    ("top-logprobs-here", b'{"prompt": "x", "top_logprobs": 3}', 400, "top_logprobs"),
    ("temperature-1e308", b'{"prompt": "x", "temperature": 1e308}', 400, "temperature"),
    ("temperature-1e999", b'{"prompt": "x", "temperature": 1e999}', 400, "temperature"),
    ("top-p-above-one", b'{"prompt": "x", "top_p": 1.01}', 400, "top_p"),
    ("seed-of-100-digits", b'{"prompt": "x", "seed": ' + b"9" * 100 + b"}", 400, "seed"),
    ("many-stops", b'{"prompt": "x", "stop": ["a"' + b',"a"' * 16 + b"]}", 400, "stop"),
    ("stop-token-negative", b'{"prompt": "x", "stop_token_ids": [-1]}', 400, "stop_token_ids[0]"),
    ("deep-value", b'{"prompt": "x", "logit_bias": ' + b'{"a":' * 900 + b"1" + b"}" * 901, 400, "logit_bias"),
    ("model-number", b'{"prompt": "x", "model": 5}', 400, "model"),
    ("model-null-byte", b'{"prompt": "x", "model": "ti\\u0000ny"}', 404, "model"),
    *[
        (f"{field}-{value[:20]}", b'{"prompt": "x", "%s": %s}' % (field.encode(), value.encode()), 400, field)
        for field, values in {
            "presence_penalty": ("2.01", "-2.01", "1e999", '"1"', "true"),
            "frequency_penalty": ("2.01", "-3", "[1]"),
            "repetition_penalty": ("0", "-1", "1e999", '"1"'),
            "logit_bias": (
                *(
                    '{"5": 101}',
                    '{"5": -100.5}',
                    '{"5": null}',
                    '{"5": true}',
                    '{"5": "1"}',
                    "[5]",
                    "5",
                ),
                *(
                    '{"258": 1}',
                    '{"4294967296": 1}',
                    '{"-1": 1}',
                    '{"x": 1}',
                    '{"": 1}',
                    '{"5.0": 1}',
                    '{"\\u0665": 1}',
                ),
                *('{%s"5": 1}' % ('"5": 1,' * 1024), '{"5": %s}' % ("[" * 900 + "]" * 900)),
            ),
        }.items()
        for value in values
    ],
    ("bias-1e999", b'{"prompt": "x", "logit_bias": {"5": 1e999}}', 400, "logit_bias[...]"),
    ("top-k", b'{"prompt": "x", "top_k": -2}', 400, "top_k"),
    ("min-p", b'{"prompt": "x", "min_p": 1.5}', 400, "min_p"),
    ("min-tokens", b'{"prompt": "x", "min_tokens": 17}', 400, "min_tokens"),
    ("unknown", b'{"prompt": "x", "beam_with": 4}', 400, "beam_with"),
    ("seed-text", b'{"prompt": "x", "seed": "1"}', 400, "seed"),
]


@pytest.mark.parametrize(("body", "status", "param"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_request_gets_openais_error_and_names_its_field(
    lab: Served, body: bytes, status: int, param: str | None
) -> None:
    response = lab.post("/v1/completions", None, raw=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([{"role": "user"}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].image_url",
        ),
        ([{"content": "x"}], "messages[0].role"),
    ],
)
def test_bad_messages_are_refused_with_their_place(lab: Served, messages: Any, param: str) -> None:
    response = lab.post("/v1/chat/completions", {"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_fields_at_their_neutral_values_are_accepted_as_load_generators_send_them(lab: Served) -> None:
    body = {
        "model": "tiny",
        "prompt": "hello",
        "max_tokens": 3,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": None,
        "n": 1,
        "best_of": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "top_k": -1,
        "user": "someone",
        "ignore_eos": True,
    }
    assert lab.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 3


def test_a_body_beyond_the_limit_is_refused_unread(lab: Served) -> None:
    assert lab.post("/v1/completions", None, raw=b'{"prompt": "' + b"x" * (17 << 20)).status_code == 413
    within = lab.post("/v1/completions", None, raw=b'{"prompt": "' + b"x" * (10 << 20) + b'"}')
    assert within.json()["error"]["code"] == "context_length_exceeded"


def test_a_client_that_leaves_before_its_body_is_whole_is_no_error(
    lab: Served, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave() -> None:
        url = lab.wan.http.base_url
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.sleep(0.1)

    lab.run(leave())
    assert "Exception" not in caplog.text
    assert lab.get("/health").status_code == 200


def test_wrong_paths_and_methods_get_the_error_shape(lab: Served) -> None:
    assert lab.get("/v1/nope").json()["error"]["message"] == "GET /v1/nope: Not Found"
    assert lab.get("/v1/completions").status_code == 405
    assert "error" in lab.get("/v1/completions").json()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(
    ["prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "stream_options", "n", "ignore_eos", "logit_bias"]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(fields, json_values, max_size=4), st.binary(max_size=50))
def test_no_body_breaks_the_gateway(lab: Served, changes: dict[str, Any], raw: bytes) -> None:
    response = lab.post("/v1/completions", {"prompt": "x", "max_tokens": 2, **changes})
    assert response.status_code in (200, 400), response.text
    assert lab.post("/v1/completions", None, raw=raw).status_code == 400


def test_health_says_what_is_missing_and_without_any_worker_the_answer_is_503(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    expected = generate(tiny, PROMPT, Sampling(max_tokens=8))

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as wan:
            peers = wan.cluster.gateway.dispatcher.peers
            await wan.cluster.hosts["md0"].close()
            await eventually(lambda: peers.link("md0") is None, 5, "main decode is missed")
            health = await wan.http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "unavailable")
            assert "main-decode" in health.json()["reason"]
            assert (await wan.complete(PROMPT, 8))["pdd"]["token_ids"] == expected, "those who are left answer"
            for name in ("p0", "rld0"):
                await wan.cluster.hosts[name].close()
            await eventually(lambda: not peers.connected(), 5, "all are missed")
            response = await wan.http.post("/v1/completions", json={"prompt": "x"})
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "no_worker"
            assert response.json()["error"]["message"]
            assert wan.cluster.gateway.admission.running == 0

    run(test())
