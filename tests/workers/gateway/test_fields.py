"""The tables of docs/api.md against the code: every field is in one of them, and does what its table says."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from workers.gateway.bodies import IGNORED, NEUTRAL, NEUTRAL_OF, parse_body
from workers.gateway.chat_requests import ChatMessage, ChatRequest
from workers.gateway.errors import ApiError
from workers.gateway.requests import CompletionRequest, StreamOptions

DOCS = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
KINDS = {"completions": CompletionRequest, "chats": ChatRequest}
LEAST: dict[type, dict[str, Any]] = {
    CompletionRequest: {"prompt": "x"},
    ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
}
ANY_VALUE: list[Any] = [None, True, False, 0, 7, 1.5, "", "word", [], [1], ["a"], {}, {"a": 1}, {"a": {"b": []}}]


def section(title: str) -> str:
    return DOCS.partition(f"### {title}\n")[2].partition("\n#")[0]


def names(text: str) -> list[str]:
    return re.findall(r"`([a-z_]+)`", text)


def rows(title: str) -> list[tuple[list[str], str]]:
    cells = [line.strip("| ").split(" | ", 1) for line in section(title).splitlines() if line.startswith("| `")]
    return [(names(fields), values) for fields, values in cells]


HONOURED = [name for fields, _ in rows("Honoured") for name in fields]
NOTHING_CHANGED = {name: values for fields, values in rows("Accepted at values that change nothing") for name in fields}
NEVER = names(section("Accepted, and never change an answer").partition("(")[0])


def test_every_field_of_the_code_is_in_one_table_and_every_field_of_a_table_in_the_code() -> None:
    known = {name for kind in LEAST for name in kind.__struct_fields__}
    given = [*HONOURED, *NOTHING_CHANGED, *NEVER]
    twice = {name for name in given if given.count(name) > 1} - {"tool_choice", "echo"}
    assert not twice
    assert set(given) == known
    raw = {name for kind in LEAST for name in kind.__struct_fields__ if isinstance(getattr(least(kind), name), Raw)}
    assert raw >= NOTHING_CHANGED.keys() - {"echo"}
    assert set(NEVER) == IGNORED
    message = DOCS.partition("A message has ")[2].partition("\n\n")[0]
    assert set(names(message)) >= set(ChatMessage.__struct_fields__)
    options = next(values for fields, values in rows("Honoured") if "stream_options" in fields)
    assert set(names(options)) == set(StreamOptions.__struct_fields__)


def least(kind: type[Any]) -> Any:
    return parse_body(kind, json.dumps(LEAST[kind]).encode())


def of_each(given: Iterable[str]) -> list[Any]:
    """Each field with each endpoint that has it."""
    return [
        pytest.param(name, kind, id=f"{name}-{endpoint}")
        for name in given
        for endpoint, kind in KINDS.items()
        if name in kind.__struct_fields__ and (name, kind) != ("echo", CompletionRequest)
    ]


@pytest.mark.parametrize(("name", "kind"), of_each(NOTHING_CHANGED))
def test_a_field_is_accepted_at_the_values_of_the_table_and_refused_by_name_at_any_other(name: str, kind: type) -> None:
    allowed = (NEUTRAL | NEUTRAL_OF[kind])[name]
    told = NOTHING_CHANGED[name]
    for endpoint, other in KINDS.items():
        if f"{endpoint}: " in told and other is kind:
            told = told.partition(f"{endpoint}: ")[2].partition(";")[0]
    assert [json.loads(value) for value in re.findall(r"`([^`]+)`", told)] == list(allowed)
    for value in [*ANY_VALUE, *allowed]:
        body = json.dumps({**LEAST[kind], name: value}).encode()
        neutral = value is None or any(value == one and type(value) is type(one) for one in allowed)
        if neutral:
            parse_body(kind, body)
        elif not any(value == one for one in allowed):  # 0 and False, 1 and 1.0 aside
            with pytest.raises(ApiError) as refused:
                parse_body(kind, body)
            assert (refused.value.status, refused.value.param) == (400, name)
            assert refused.value.code == "unsupported_parameter"


@pytest.mark.parametrize(("name", "kind"), of_each(NEVER))
def test_a_field_that_never_changes_an_answer_is_accepted_at_any_value(name: str, kind: type) -> None:
    for value in ANY_VALUE:
        parse_body(kind, json.dumps({**LEAST[kind], name: value}).encode())


USER = {"role": "user", "content": "x"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bern"}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
DEEP = [
    ({"messages": [USER, {**USER, "foo": 1}]}, "messages[1].foo"),
    ({"messages": [{**USER, "audio": {"id": "a"}}]}, "messages[0].audio"),
    ({"messages": [{**USER, "annotations": [{}]}]}, "messages[0].annotations"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "foo": 1}]}]},
        "messages[0].content[0].foo",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "foo": 1}]}]}, "messages[0].tool_calls[0].foo"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "bar": 1}}]}]},
        "messages[0].tool_calls[0].function.bar",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [CALL, {"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[1].function.arguments",
    ),
    ({"messages": [USER], "stream": True, "stream_options": {"foo": 1}}, "stream_options.foo"),
    ({"messages": [USER], "stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"messages": [USER], "tools": [{**TOOL, "foo": 1}], "tool_choice": "none"}, "tools[0].foo"),
    ({"messages": [USER], "tools": [TOOL, {"type": "custom"}], "tool_choice": "none"}, "tools[1].type"),
    ({"messages": [USER], "tools": [TOOL]}, "tool_choice"),
    ({"messages": [USER], "tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
    ({"messages": [USER], "tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"messages": [USER], "documents": [{"text": 5}]}, "documents[0][...]"),
    ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"messages": [USER], "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
    ({"messages": [USER], "chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [USER], "best_of": 1}, "best_of"),
    ({"messages": [USER], "x" * 5000: 1}, "x" * 256),
]


@pytest.mark.parametrize(("body", "param"), DEEP, ids=[param[:60] for _, param in DEEP])
def test_what_is_refused_is_named_with_its_whole_path(body: dict[str, Any], param: str) -> None:
    def read() -> None:
        request = parse_body(ChatRequest, json.dumps(body).encode())
        _ = request.plain_messages, request.template_variables

    with pytest.raises(ApiError) as refused:
        read()
    assert (refused.value.status, refused.value.param) == (400, param)
    assert len(str(refused.value)) < 500


def test_a_chat_of_calls_reaches_the_template_as_transformers_passes_it() -> None:
    sent = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Weather?", "name": "ada"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None, "annotations": []},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "It said so.", "tool_calls": []},
        {"role": "assistant", "function_call": {"name": "f", "arguments": ""}},
        {"role": "function", "name": "f", "content": "1"},
        {"role": "assistant", "refusal": "No."},
    ]
    options = {"enable_thinking": False, "custom": [1]}
    asked = {"tools": [TOOL], "tool_choice": "none", "documents": [{"title": "t", "text": "x"}]}
    asked |= {"chat_template_kwargs": options, "reasoning_effort": "low", "add_generation_prompt": False}
    request = parse_body(ChatRequest, json.dumps({"messages": sent, **asked}).encode())
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"city": "Bern"}}}
    assert request.plain_messages == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Weather?", "name": "ada"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "It said so."},
        {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": {}}},
        {"role": "function", "name": "f", "content": "1"},
        {"role": "assistant", "content": "", "refusal": "No."},
    ]
    assert request.template_variables == {
        **options,
        "tools": [TOOL],
        "documents": [{"title": "t", "text": "x"}],
        "reasoning_effort": "low",
        "add_generation_prompt": False,
    }


def test_a_bodys_bytes_are_not_kept_once_it_is_read() -> None:
    body = json.dumps({"prompt": "x", "metadata": {"a": "b" * 1000}, "vllm_xargs": {}, "user": "u"}).encode()
    request = parse_body(CompletionRequest, body)
    held = [bytes(value) for name in request.__struct_fields__ if isinstance(value := getattr(request, name), Raw)]
    assert set(held) == {b"null", b'"x"'}
