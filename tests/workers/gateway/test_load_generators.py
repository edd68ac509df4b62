"""What guidellm, aiperf and vllm bench serve really send, recorded: each request is served, and read as they read it.

docs/api.md has the commands that were recorded. The clients themselves are no dependencies.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.workers.serving import Served

RECORDED = {path.stem: json.loads(path.read_text()) for path in Path("tests/fixtures/requests").glob("*.json")}
REQUESTS = [
    pytest.param(request["path"], request["body"], id=f"{client}-{number}")
    for client, recorded in sorted(RECORDED.items())
    for number, request in enumerate(recorded["requests"])
]


def test_requests_of_every_client_are_recorded() -> None:
    assert RECORDED.keys() == {"aiperf", "guidellm", "vllm"}


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_recorded_request_is_served_token_for_token(lab: Served, path: str, body: dict[str, Any]) -> None:
    *chunks, last = lab.events(path, body)
    wanted = body.get("max_tokens") or body["max_completion_tokens"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == wanted, "with ignore_eos as many as were asked for"
    tokens = [len(chunk["pdd"]["token_ids"]) for chunk in chunks]
    assert min(tokens) >= 1, "every chunk has a token: TTFT is the first one's time, and ITL is that of tokens"
    assert sum(tokens) == wanted
    if body["stream_options"].get("continuous_usage_stats"):
        told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert told == [sum(tokens[: count + 1]) for count in range(len(tokens))]
    if path.endswith("/chat/completions"):
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
