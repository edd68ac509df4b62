"""From a body's bytes to a checked request. An option that is not built is refused by its name, never ignored."""

import codecs
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from workers.gateway.decoding import NULL, decode, size
from workers.gateway.errors import ApiError
from workers.gateway.requests import ChatRequest, CompletionRequest, GenerationRequest

MAX_OBJECTS = 20_000  # messages and parts of messages, each of which takes 200 bytes and more

# Known fields that are accepted at the values which change nothing (and at null). Any other value is refused by name,
# because an ignored parameter is an answer to another question.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "ec_transfer_params": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),  # 0 asks for those of the prompt's tokens
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "stream_interval": (1,),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none", "auto"),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
NEUTRAL_OF: dict[type[GenerationRequest], dict[str, tuple[Any, ...]]] = {
    CompletionRequest: {"add_special_tokens": (True,)},
    ChatRequest: {"add_special_tokens": (False,), "continue_final_message": (False,), "echo": (False,)},
}
NEUTRAL_OF_MESSAGE: dict[str, tuple[Any, ...]] = {"annotations": ([],), "audio": ()}
# Fields that never change the answer, whatever their value.
IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "return_mm_kwargs",
        "safety_identifier",
        "service_tier",
        "session_id",
        "spaces_between_special_tokens",
        "store",
        "user",
    }
)
MAX_NEUTRAL_BYTES = 100

R = TypeVar("R", bound="GenerationRequest")


def parse_body(kind: type[R], body: bytes | bytearray) -> R:
    """A request of `kind` from a body. Raises ApiError (400) with the offending field's path in `param`."""
    _check_utf8(body)
    if kind is ChatRequest and body.count(b"{") > MAX_OBJECTS:
        _check_objects(decode(body, _Messages).messages)
    request = decode(body, kind)
    neutral = NEUTRAL | NEUTRAL_OF[kind]
    for name in neutral.keys() & set(kind.__struct_fields__):
        _check_neutral(name, getattr(request, name), neutral[name])
    if isinstance(request, ChatRequest):
        for index, message in enumerate(request.messages):
            for name, allowed in NEUTRAL_OF_MESSAGE.items():
                _check_neutral(f"messages[{index}].{name}", getattr(message, name), allowed)
    request.check_together()
    for name in (neutral.keys() | IGNORED) & set(kind.__struct_fields__):
        setattr(request, name, NULL)  # a slice of the body would keep all of it
    return request


class _Messages(Struct):
    messages: Raw = NULL


def _check_objects(messages: Raw) -> None:
    """Before megabytes of `{}` become objects. Text may be full of braces: only those outside of it count."""
    data = bytes(messages).replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = data.count(b'"') // 2
    # without escaped ones, every second part between quotes is outside; as many texts as this belong to more objects
    found = b"".join(data.split(b'"')[::2]).count(b"{") if strings <= 20 * MAX_OBJECTS else strings // 20
    if found > MAX_OBJECTS:
        raise ApiError(400, f"messages has more than {MAX_OBJECTS} messages and parts; send fewer", param="messages")


def _check_utf8(body: bytes | bytearray) -> None:
    """In parts: as one text it would take up to four times its bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(body) + 1, 1 << 16):
        part = body[start : start + (1 << 16)]
        try:
            decoder.decode(part, final=start + len(part) == len(body))
        except UnicodeDecodeError as error:
            raise ApiError(
                400, f"the body is not valid UTF-8 (byte {start + error.start}); encode it as UTF-8"
            ) from None


def _check_neutral(place: str, raw: Raw, neutral: tuple[Any, ...]) -> None:
    if raw is NULL:
        return
    if size(raw) <= MAX_NEUTRAL_BYTES:
        value = msgspec.json.decode(raw)
        # 1 == True in Python, so compare types as well, with any number equal to its like
        if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
            return
    allowed = " or ".join(msgspec.json.encode(one).decode() for one in neutral) or "null"
    raise ApiError(
        400,
        f"{place} is not supported by this testbed except as {allowed}; leave it out",
        param=place,
        code="unsupported_parameter",
    )
