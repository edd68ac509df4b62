"""Usage, ids, text and the record tell of the same tokens, however an answer ends and however it is read."""

import asyncio
import json
import math
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.workers.serving import Served, SlowWan, connect_without_reading, eventually, prompt_of, records_in, run
from workers.engine import Sampling, generate
from workers.models import LoadedModel
from workers.models.tokenizer import BOS, EOS

PROMPT = prompt_of(40)


def stop_of(tiny: LoadedModel, after: int, seed: int) -> str:
    """A string that one of the sampled answers contains."""
    return tiny.tokenizer.decode(generate(tiny, PROMPT, Sampling(60, 1.0, seed=seed, ignore_eos=True)))[
        after : after + 2
    ]


MODES: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 30},
    "n": {"max_tokens": 30, "n": 4},
    "best-of": {"max_tokens": 30, "n": 2, "best_of": 2},
    "several-prompts": {"max_tokens": 20, "n": 2, "prompt": [PROMPT, prompt_of(7)]},
    "stop": {"max_tokens": 70, "stop": "STOP"},
    "stop-shown": {"max_tokens": 70, "stop": "STOP", "include_stop_str_in_output": True},
    "n-stop": {"max_tokens": 70, "n": 4, "stop": "STOP"},
    "stop-ids": {"max_tokens": 70, "n": 2, "stop_token_ids": [101, 32, 120]},
    "echo": {"max_tokens": 70, "echo": True, "stop": "STOP"},
    "one": {"max_tokens": 1, "n": 3},
}


@pytest.mark.parametrize("fields", MODES.values(), ids=MODES)
def test_usage_is_the_ids_that_were_delivered_in_every_mode(
    tiny: LoadedModel, lab: Served, fields: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT, "temperature": 1.0, "seed": 5, "ignore_eos": True, "return_token_ids": True, **fields}
    if "stop" in body:
        body["stop"] = stop_of(tiny, 30, 5)
    whole = lab.post("/v1/completions", body).json()
    ids = [choice["token_ids"] for choice in whole["choices"]]
    records = [choice["record"] for choice in whole["pdd"].get("choices", [whole["pdd"]])]
    assert whole["usage"]["completion_tokens"] == sum(map(len, ids))
    assert [record["output_len"] for record in records] == list(map(len, ids))
    assert [record["pdd_rld_tokens"] + record["pdd_md_tokens"] for record in records] == list(map(len, ids))
    assert [record["finish_reason"] for record in records] == [one["finish_reason"] for one in whole["choices"]]
    prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
    assert [one["prompt_token_ids"] for one in whole["choices"]] == [
        p for p in prompts for _ in range(body.get("n", 1))
    ]
    if "stop" in body:
        assert any(one["finish_reason"] == "stop" for one in whole["choices"])

    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = lab.events("/v1/completions", {**body, "stream_options": options})
    assert last["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {"prompt_tokens_details": None}
    streamed: dict[int, list[int]] = {index: [] for index in range(len(ids))}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert choice["token_ids"], "no chunk without a token: the first one is the first token"
        assert chunk["pdd"]["token_ids"] == choice["token_ids"]
        assert ("prompt_token_ids" in choice) is (not streamed[choice["index"]])
        streamed[choice["index"]] += choice["token_ids"]
        assert chunk["usage"]["completion_tokens"] == len(streamed[choice["index"]])
        assert chunk["usage"]["prompt_tokens"] == len(prompts[choice["index"] // body.get("n", 1)])
    assert list(streamed.values()) == ids
    texts = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in streamed]
    assert texts == [choice["text"] for choice in whole["choices"]]


def test_a_slow_reader_of_stopped_choices_gets_as_many_ids_as_it_is_told(tiny: LoadedModel, tmp_path: Path) -> None:
    """It begins to read when all is made; the kernel's buffers are small, so that the answer waits in the gateway."""
    body = {"prompt": PROMPT, "temperature": 1.0, "seed": 5, "max_tokens": 250, "n": 4, "ignore_eos": True}
    body |= {"stop": stop_of(tiny, 30, 5), "stream": True, "stream_options": {"include_usage": True}, "logprobs": 20}

    async def test() -> list[dict[str, Any]]:
        async with SlowWan(tiny, tmp_path, None) as lab:
            lab.cluster._plan.sockets["gw0"].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 10)
            sock = await connect_without_reading(lab.cluster.port("gw0"), body)
            gateway = lab.cluster.gateway
            await eventually(lambda: bool(lab.md0.active), 5, "it is asked")
            await eventually(lambda: not any(worker.active for worker in lab.workers), 50, "all is made")
            reader, writer = await asyncio.open_connection(sock=sock)
            events = []
            while (line := await reader.readline()) != b"data: [DONE]\n":
                if line.startswith(b"data: {"):
                    events.append(json.loads(line[6:]))
            writer.close()
            await eventually(lambda: not gateway.dispatcher.live, 5, "the records are written")
            return events

    *chunks, last = run(test())
    delivered = sum(len(chunk["pdd"]["token_ids"]) for chunk in chunks)
    assert last["usage"]["completion_tokens"] == delivered
    records = records_in(tmp_path)
    assert sum(record["output_len"] for record in records) == delivered
    assert sum(record["pdd_rld_tokens"] + record["pdd_md_tokens"] for record in records) == delivered
    assert {record["finish_reason"] for record in records} >= {"stop"}


def test_a_chat_begins_with_its_first_token_and_says_continuous_usage(tiny: LoadedModel, lab: Served) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0}
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": True}
    *chunks, last = lab.events("/v1/chat/completions", body)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[0]["usage"]["completion_tokens"] == len(chunks[0]["choices"][0]["token_ids"]) >= 1
    assert chunks[0]["prompt_token_ids"] == tiny.tokenizer.apply_chat_template(body["messages"])
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == last["usage"]["completion_tokens"] == 12


def special_answer(tiny: LoadedModel) -> tuple[int, list[int]]:
    """A seed whose answer has a special token in its middle, and the answer."""
    for seed in range(100):
        ids = generate(tiny, PROMPT, Sampling(90, 2.0, seed=seed, ignore_eos=True))
        if any(token in (BOS, EOS) for token in ids[20:]) and not any(token in (BOS, EOS) for token in ids[:20]):
            return seed, ids
    raise AssertionError("no seed of 100 has one")


def test_a_special_token_stops_an_answer_as_a_stop_string_and_is_shown_when_asked_for(
    tiny: LoadedModel, lab: Served
) -> None:
    seed, ids = special_answer(tiny)
    at = next(index for index, token in enumerate(ids) if token in (BOS, EOS))
    name = tiny.tokenizer.special_text(ids[at])
    body = {"prompt": PROMPT, "temperature": 2.0, "seed": seed, "ignore_eos": True, "max_tokens": 90}
    text = tiny.tokenizer.decode(ids[:at])
    stopped = lab.post("/v1/completions", {**body, "stop": name}).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["pdd"]["token_ids"] == ids[: at + 1]
    assert stopped["choices"][0]["text"] == text
    shown = lab.post("/v1/completions", {**body, "skip_special_tokens": False}).json()
    assert shown["choices"][0]["text"].startswith(text + name)
    both = {**body, "stop": name, "skip_special_tokens": False, "include_stop_str_in_output": True}
    assert lab.post("/v1/completions", both).json()["choices"][0]["text"] == text + name
    logprobs = {**body, "max_tokens": at + 5, "skip_special_tokens": False, "logprobs": 0}
    offsets = lab.post("/v1/completions", logprobs).json()["choices"][0]["logprobs"]["text_offset"]
    assert offsets[at + 1] == len(text) + len(name)


def test_a_stop_token_ends_the_ids_and_not_the_text(tiny: LoadedModel, lab: Served) -> None:
    expected = generate(tiny, PROMPT, Sampling(max_tokens=60))
    at = expected.index(expected[20])
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stop_token_ids": [expected[20]]}
    whole = lab.post("/v1/completions", body).json()
    assert whole["pdd"]["token_ids"] == expected[: at + 1]
    assert whole["choices"][0]["text"] == tiny.tokenizer.decode(expected[:at])
    with_it = lab.post("/v1/completions", {**body, "include_stop_str_in_output": True}).json()
    assert with_it["choices"][0]["text"] == tiny.tokenizer.decode(expected[: at + 1])


def test_of_a_prompt_the_last_tokens_are_taken_and_ids_stand_for_tokens_in_log_probabilities(
    tiny: LoadedModel, lab: Served
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    cut = lab.post("/v1/completions", {**body, "truncate_prompt_tokens": 10, "request_id": "mine"}).json()
    assert cut["pdd"]["token_ids"] == generate(tiny, PROMPT[-10:], Sampling(max_tokens=5))
    assert (cut["usage"]["prompt_tokens"], cut["id"]) == (10, "cmpl-mine")
    named = lab.post("/v1/completions", {**body, "logprobs": 1, "return_tokens_as_token_ids": True}).json()
    assert named["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token}" for token in named["pdd"]["token_ids"]]


def test_min_tokens_bars_end_tokens_stop_tokens_and_stop_strings_also_across_the_hand_over(
    tiny: LoadedModel, lab: Served
) -> None:
    free = generate(tiny, PROMPT, Sampling(40))
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "stop_token_ids": [free[3]], "ignore_eos": True}
    whole = lab.post("/v1/completions", {**body, "min_tokens": 25}).json()
    expected = generate(
        tiny, PROMPT, Sampling(40, ignore_eos=True, stop_token_ids=(free[3],), barred=(free[3], EOS), barred_until=65)
    )
    assert whole["pdd"]["token_ids"] == expected
    assert len(expected) >= 25
    assert not {free[3], EOS} & set(expected[:25])
    assert set(whole["pdd"]["instances"]) == {"rld0", "md0"}
    text = tiny.tokenizer.decode(free)
    stopped = lab.post("/v1/completions", {**body, "stop_token_ids": [], "stop": text[5:7], "min_tokens": 30}).json()
    assert stopped["usage"]["completion_tokens"] > 30


@pytest.mark.parametrize("temperature", [0, 1])
def test_penalties_and_biases_choose_as_alone_also_across_the_hand_over(
    tiny: LoadedModel, lab: Served, temperature: int
) -> None:
    body = {
        "prompt": PROMPT,
        "temperature": temperature,
        "seed": 3,
        "max_tokens": 40,
        "ignore_eos": True,
        "logprobs": 2,
    }
    fields = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    biases = {PROMPT[0]: -100.0, 65: 1.5}
    given = []
    for some in ({}, *({name: fields[name]} for name in fields), fields):
        whole = lab.post("/v1/completions", {**body, **some, "logit_bias": biases if some == fields else {}}).json()
        sampling = Sampling(
            40,
            temperature,
            seed=3,
            ignore_eos=True,
            logit_bias=tuple(biases.items()) if some == fields else (),
            **some,  # type: ignore[arg-type]
        )
        assert whole["pdd"]["token_ids"] == generate(tiny, PROMPT, sampling)
        assert set(whole["pdd"]["instances"]) == {"rld0", "md0"}
        assert whole["pdd"]["token_ids"] not in given
        given.append(whole["pdd"]["token_ids"])


@pytest.mark.parametrize("fields", [{"top_k": 3}, {"min_p": 0.3}, {"top_k": 5, "min_p": 0.05, "top_p": 0.9}], ids=str)
def test_sampled_tokens_are_among_those_that_top_k_and_min_p_leave(
    tiny: LoadedModel, lab: Served, fields: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT, "temperature": 1.0, "seed": 3, "max_tokens": 30, "ignore_eos": True, "logprobs": 8}
    whole = lab.post("/v1/completions", {**body, **fields}).json()
    assert whole["pdd"]["token_ids"] == generate(tiny, PROMPT, Sampling(30, 1.0, seed=3, ignore_eos=True, **fields))
    free = lab.post("/v1/completions", body).json()
    assert whole["pdd"]["token_ids"] != free["pdd"]["token_ids"]
    logprobs = whole["choices"][0]["logprobs"]
    for chosen, likeliest in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        values = sorted(likeliest.values(), reverse=True)
        if "top_k" in fields:
            assert chosen >= values[fields["top_k"] - 1] - 1e-6
        assert chosen >= values[0] + math.log(fields.get("min_p", 1e-9)) - 1e-4
