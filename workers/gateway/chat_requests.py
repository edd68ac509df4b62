"""Chat requests as OpenAI's and vLLM's clients send them: messages, tool calls, tools; and what chat templates get."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from workers.gateway.errors import ApiError
from workers.gateway.json_fields import NULL, decode, first_byte, items, size
from workers.gateway.requests import MAX_LOGPROBS, GenerationRequest, TokenCount

MAX_MESSAGES = 10_000
MAX_PARTS = 10_000  # of one message
MAX_ARGUMENTS_BYTES = 1 << 20  # of one tool call, which templates get as an object

Name = Annotated[str, Meta(max_length=1000)]


class ContentPart(Struct, forbid_unknown_fields=True, gc=False):
    """A part of a message's content: of all kinds only text is taken."""

    type: str
    text: str | None = None


class CalledFunction(Struct, forbid_unknown_fields=True, gc=False):
    name: Name
    arguments: str | None = None  # JSON


class ToolCall(Struct, forbid_unknown_fields=True, gc=False):
    """A call that an assistant made in an earlier turn."""

    function: CalledFunction
    id: Name | None = None
    type: Name | None = None
    index: int | None = None  # of streamed calls; says nothing that their order does not


class ChatMessage(Struct, forbid_unknown_fields=True, gc=False):
    """One message. Every field goes to the chat template as transformers passes it."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    name: Name | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Name | None = None
    function_call: CalledFunction | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: Raw = NULL
    audio: Raw = NULL

    def plain(self, place: str) -> dict[str, Any]:
        """The message as chat templates take it, its text in one piece. Raises ApiError for anything else."""
        message: dict[str, Any] = {"role": self.role, "content": self._text(place)}
        for field in ("name", "tool_call_id", "refusal", "reasoning_content", "reasoning"):
            if (value := getattr(self, field)) is not None:
                message[field] = value
        if self.tool_calls:
            message["tool_calls"] = [
                _call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(self.tool_calls)
            ]
        if self.function_call is not None:
            message["function_call"] = _function(self.function_call, f"{place}.function_call")
        return message

    def _text(self, place: str) -> str:
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            if self.role == "assistant" and (self.tool_calls or self.function_call or self.refusal is not None):
                return ""
            raise ApiError(400, f"{place}.content is missing; give text", param=f"{place}.content")
        for index, part in enumerate(self.content):
            if part.type != "text" or part.text is None:
                raise ApiError(
                    400,
                    f"content part of type {part.type[:60]!r} is not supported; send text",
                    param=f"{place}.content[{index}]",
                )
        return "".join(part.text or "" for part in self.content)


def _call(call: ToolCall, place: str) -> dict[str, Any]:
    named = {} if call.id is None else {"id": call.id}
    return {**named, "type": call.type or "function", "function": _function(call.function, f"{place}.function")}


def _function(called: CalledFunction, place: str) -> dict[str, Any]:
    """Name and arguments, these as the object that they are: templates of models write it their own way."""
    given, param = called.arguments or "{}", f"{place}.arguments"
    if len(given) > MAX_ARGUMENTS_BYTES:
        raise ApiError(400, f"{param} has more than {MAX_ARGUMENTS_BYTES} characters; send less", param=param)
    try:
        arguments = msgspec.json.decode(given)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ApiError(400, f"{param} is not valid JSON: {error}", param=param) from None
    return {"name": called.name, "arguments": arguments}


class ToolFunction(Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True):
    """A function that the model is told of."""

    type: Annotated[str, Meta(pattern="^function$")]
    function: ToolFunction


MAX_TEMPLATE_BYTES = 1 << 20  # of what a chat template gets besides the messages, each
RESERVED = frozenset({"self", "messages", "tools", "documents", "chat_template", "tokenize", "continue_final_message"})


def template_variables(kwargs: Raw, tools: Raw, documents: Raw) -> dict[str, Any]:
    """Variables that a chat template gets besides the messages. Raises ApiError."""
    for name, raw in {"chat_template_kwargs": kwargs, "tools": tools, "documents": documents}.items():
        if size(raw) > MAX_TEMPLATE_BYTES:
            raise ApiError(400, f"{name} has more than {MAX_TEMPLATE_BYTES} bytes; send less", param=name)
    variables = decode(kwargs, dict[str, Any] | None, "chat_template_kwargs") or {}
    if taken := next((name for name in variables if name in RESERVED), None):
        param = f"chat_template_kwargs.{taken}"
        raise ApiError(400, f"{param} has a place of its own in the request; give it there", param=param)
    if told := decode(tools, list[Tool] | None, "tools"):
        variables["tools"] = msgspec.to_builtins(told)
    if given := decode(documents, list[dict[str, str]] | None, "documents"):
        variables["documents"] = given
    return variables


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Raw = NULL
    tool_choice: Raw = NULL
    documents: Raw = NULL
    chat_template_kwargs: Raw = NULL
    reasoning_effort: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    add_generation_prompt: bool | None = None

    # accepted at the values that change nothing
    audio: Raw = NULL
    chat_template: Raw = NULL
    continue_final_message: Raw = NULL
    echo: Raw = NULL
    function_call: Raw = NULL
    functions: Raw = NULL
    include_reasoning: Raw = NULL
    media_io_kwargs: Raw = NULL
    mm_processor_kwargs: Raw = NULL
    modalities: Raw = NULL
    prediction: Raw = NULL
    return_prompt_text: Raw = NULL
    verbosity: Raw = NULL
    web_search_options: Raw = NULL

    # never changes an answer: no calls are made of answers here
    parallel_tool_calls: Raw = NULL

    @property
    def is_large(self) -> bool:
        """Whether `told` takes milliseconds."""
        told = sum(map(size, (self.chat_template_kwargs, self.tools, self.documents)))
        return len(self.messages) > 200 or told > 64 << 10

    def told(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Messages and variables for the chat template. Raises ApiError."""
        return self.plain_messages, self.template_variables

    @property
    def plain_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them. Raises ApiError."""
        return [message.plain(f"messages[{index}]") for index, message in enumerate(self.messages)]

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template besides the messages, as vLLM passes them. Raises ApiError."""
        variables = template_variables(self.chat_template_kwargs, self.tools, self.documents)
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            variables.setdefault("enable_thinking", self.reasoning_effort != "none")
        if self.add_generation_prompt is not None:
            variables["add_generation_prompt"] = self.add_generation_prompt
        return variables

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_together(self) -> None:
        super().check_together()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs goes with logprobs: true only", param="top_logprobs")
        if items(self.tools, 0) != [] and first_byte(self.tools) == b"[" and bytes(self.tool_choice) != b'"none"':
            raise ApiError(
                400,
                'tool calls are not made of answers here: give tool_choice: "none", with which the model is told of '
                "the tools and its answer comes as text",
                param="tool_choice",
                code="unsupported_parameter",
            )
