"""What a client may ask: OpenAI's fields, checked strictly."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from workers.gateway.errors import ApiError

MAX_CHOICES = 128  # of one request: OpenAI's limit for n
MAX_LOGPROBS = 20  # OpenAI's limit for top_logprobs


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers; changes no answer


Stop = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]


class GenerationRequest(BaseModel):
    """Fields that both endpoints share."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def top_logprobs_wanted(self) -> int | None:
        """How many likeliest tokens are wanted in each place; None: no log probabilities at all."""
        raise NotImplementedError

    def check_together(self) -> None:
        """What single fields cannot tell. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options goes with stream: true only", param="stream_options")


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. A prompt is text or token ids; there may be a list of them."""

    prompt: Any  # checked by `prompts`: a validator that collects every wrong item of a long list takes gigabytes
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, at least one. Raises ApiError."""
        given = self.prompt
        if isinstance(given, str) or (isinstance(given, list) and given and _is_number(given[0])):
            return [_checked(given, "prompt")]
        if not isinstance(given, list):
            raise ApiError(400, f"prompt is a {type(given).__name__}; give text or token ids", param="prompt")
        if not given:
            raise ApiError(400, "the prompt is empty; give at least one token", param="prompt")
        if len(given) > MAX_CHOICES:
            raise ApiError(
                400,
                f"{len(given)} prompts in one request; send at most {MAX_CHOICES}, or several requests",
                param="prompt",
            )
        return [_checked(one, f"prompt.{index}") for index, one in enumerate(given)]

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    def check_together(self) -> None:
        super().check_together()
        if self.echo and self.logprobs is not None:
            raise ApiError(
                400, "log probabilities of the prompt are not built: leave out echo or logprobs", param="echo"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked(prompt: Any, param: str) -> str | list[int]:
    """Text, or token ids that are whole numbers. Raises ApiError."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise ApiError(400, f"{param} is a {type(prompt).__name__}; give text or token ids", param=param)
    wrong = next((index for index, token in enumerate(prompt) if type(token) is not int), None)
    if wrong is not None:
        raise ApiError(400, f"{param}.{wrong} is no token id: ids are whole numbers", param=f"{param}.{wrong}")
    return prompt


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)
    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    def plain(self, index: int) -> dict[str, str]:
        """Role and text, as chat templates take them. Raises ApiError for anything but text."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise ApiError(
                    400,
                    f"content part of type {part.type[:60]!r} is not supported; send text",
                    param=f"messages.{index}.content",
                )
        return {"role": self.role, "content": "".join(part.text or "" for part in self.content)}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=10_000)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def plain_messages(self) -> list[dict[str, str]]:
        return [message.plain(index) for index, message in enumerate(self.messages)]

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_together(self) -> None:
        super().check_together()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs goes with logprobs: true only", param="top_logprobs")
