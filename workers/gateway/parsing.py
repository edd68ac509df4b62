"""From a body's bytes to a checked request. An option that is not built is refused by its name, never ignored."""

import reprlib
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from workers.gateway.errors import ApiError
from workers.gateway.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
    TextPart,
)

MAX_BODY_BYTES = 16 << 20

# Known fields that are accepted at the values which change nothing. Everything else is refused by name, because an
# ignored parameter is an answer to another question.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "echo": (None, False),
    "prompt_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "use_beam_search": (None, False),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "skip_special_tokens": (None, True),
    "add_generation_prompt": (None, True),
}
# Fields that never change the answer, whatever their value.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "request_id",
        "priority",
    }
)


R = TypeVar("R", bound="GenerationRequest")


def parse_body(kind: type[R], body: bytes | bytearray) -> R:
    """A request of `kind` from a body. Raises ApiError (400) with the offending field in `param`."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 (byte {error.start}); encode it as UTF-8") from None
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body must be a JSON object, not {type(fields).__name__}")
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise _from_validation(error) from None
    for name, value in (request.model_extra or {}).items():
        _check_extra(name, value)
    request.check_together()
    return request


def _check_extra(name: str, value: Any) -> None:
    if name in IGNORED:
        return
    if name not in NEUTRAL:
        shown = name[:256]
        raise ApiError(400, f"unknown parameter {shown!r}; remove it", param=shown, code="unknown_parameter")
    # 1 == True in Python, so compare types as well, with any number equal to its like
    if not any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL[name]):
        allowed = " or ".join(str(neutral) for neutral in NEUTRAL[name] if neutral is not None) or "null"
        raise ApiError(
            400,
            f"{name} is not supported by this testbed except as {allowed}",
            param=name,
            code="unsupported_parameter",
        )


def _from_validation(error: ValidationError) -> ApiError:
    # a union reports one error for each of its members: the deepest location says most
    first = max(error.errors(include_url=False, include_context=False), key=lambda item: len(item["loc"]))
    path = [str(part) for part in first["loc"] if isinstance(part, int) or part in _FIELD_NAMES]
    param = ".".join(path) or None
    return ApiError(400, f"{param}: {first['msg']} (got {_SHORT.repr(first.get('input'))})", param=param)


_SHORT = reprlib.Repr()  # of a body of megabytes as well, in no time
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60
_SHORT.maxlist = _SHORT.maxdict = 3

_FIELD_NAMES = frozenset(
    name
    for model in (CompletionRequest, ChatRequest, ChatMessage, TextPart, StreamOptions)
    for name in model.model_fields
)
