"""What a fuzzer feeds to the gateway's reading of bodies, and what must hold: a checked request, or a short error."""

import json
from contextlib import suppress

from workers.gateway.bodies import parse_body
from workers.gateway.chat_requests import ChatRequest
from workers.gateway.errors import ApiError
from workers.gateway.requests import MAX_CHOICES, CompletionRequest

MOST_ERROR_BYTES = 4096  # whatever was sent, the answer that refuses it is short

SEEDS = [
    b'{"prompt": "hello", "max_tokens": 5, "temperature": 0.5, "seed": 1, "stream": true, "n": 2}',
    b'{"prompt": [1, 2, 3], "stop": ["a", "bc"], "logprobs": 3, "stop_token_ids": [5], "ignore_eos": true}',
    b'{"prompt": [[1], [2, 3]], "echo": true, "stream": true, "stream_options": {"include_usage": true}}',
    b'{"prompt": ["a", "\\u00e9\\ud83d\\ude00"], "top_p": 0.1, "logit_bias": {}, "user": "x", "best_of": 1}',
    b'{"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": [{"type": "text"}]}]}',
    b'{"messages": [{"role": "system", "content": "s"}], "logprobs": true, "top_logprobs": 4, "max_tokens": 9}',
    b'{"prompt": null, "temperature": NaN, "n": -1, "max_tokens": 1e308, "response_format": {"type": "text"}}',
]


def bodies(data: bytes) -> None:
    """Either endpoint takes the body, within its limits, or says in a short sentence why not."""
    for kind in (CompletionRequest, ChatRequest):
        with suppress(_Refused):
            request = _checked(kind, data)
            assert 1 <= (request.n or 1) <= MAX_CHOICES
            assert request.temperature is None or 0 <= request.temperature <= 2
            assert request.top_p is None or 0 < request.top_p <= 1
            assert len(request.stops) <= 16
            assert all(0 < len(stop) <= 1000 for stop in request.stops)
            assert request.top_logprobs_wanted is None or 0 <= request.top_logprobs_wanted <= 20


class _Refused(Exception):
    pass


def _checked(kind: type[CompletionRequest] | type[ChatRequest], data: bytes) -> CompletionRequest | ChatRequest:
    try:
        request = parse_body(kind, data)
        if isinstance(request, CompletionRequest):
            prompts = request.prompts(4096)
            assert 1 <= len(prompts) <= MAX_CHOICES
            assert all(isinstance(one, str) or all(type(token) is int for token in one) for one in prompts)
        else:
            for message in request.plain_messages:
                message["content"].encode()  # no lone surrogate
    except ApiError as error:
        refusal = error
    else:
        return request
    assert refusal.status == 400
    assert str(refusal)
    assert len(json.dumps(refusal.body())) <= MOST_ERROR_BYTES
    raise _Refused
