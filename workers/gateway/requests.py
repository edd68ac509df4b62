"""What a client may ask: OpenAI's fields, checked strictly; an option that is not built is refused by its name."""

from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workers.gateway.errors import ApiError

MAX_BODY_BYTES = 16 << 20

# Known fields that are accepted at the values which change nothing. Everything else is refused by name, because an
# ignored parameter is an answer to another question.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
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


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool = False


Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class GenerationRequest(BaseModel):
    """Fields that both endpoints share."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32)]], Field(max_length=64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. A prompt is text or token ids, alone or as the only one of a list."""

    prompt: str | list[int] | list[str] | list[list[int]]

    @property
    def single_prompt(self) -> str | list[int]:
        """The prompt. Raises ApiError when there are several, or none."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int)):
            if not prompt:
                raise ApiError(400, "the prompt is empty; give at least one token", param="prompt")
            if len(prompt) > 1:
                raise ApiError(400, f"{len(prompt)} prompts in one request; send one request each", param="prompt")
            prompt = prompt[0]
        return prompt


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)
    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[TextPart]

    def plain(self, index: int) -> dict[str, str]:
        """Role and text, as chat templates take them. Raises ApiError for anything but text."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise ApiError(
                    400,
                    f"content part of type {part.type!r} is not supported; send text",
                    param=f"messages.{index}.content",
                )
        return {"role": self.role, "content": "".join(part.text or "" for part in self.content)}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None

    @property
    def plain_messages(self) -> list[dict[str, str]]:
        return [message.plain(index) for index, message in enumerate(self.messages)]


R = TypeVar("R", bound="GenerationRequest")


def parse_body(kind: type[R], body: bytes) -> R:
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
    return request


def _check_extra(name: str, value: Any) -> None:
    if name in IGNORED:
        return
    if name not in NEUTRAL:
        raise ApiError(400, f"unknown parameter {name!r}; remove it", param=name[:256], code="unknown_parameter")
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
    value = repr(first.get("input"))
    shown = value if len(value) <= 60 else value[:57] + "..."
    return ApiError(400, f"{param}: {first['msg']} (got {shown})", param=param)


_FIELD_NAMES = frozenset(
    name
    for model in (CompletionRequest, ChatRequest, ChatMessage, TextPart, StreamOptions)
    for name in model.model_fields
)
