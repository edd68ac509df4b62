"""Request bodies: each of bounded size and time, all of them together of bounded memory; and the requests in them.

An option that is not built is refused by its name, never ignored.
"""

import asyncio
import codecs
import time
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from msgspec import Raw, Struct
from starlette.requests import ClientDisconnect

from workers.gateway.chat_requests import ChatRequest
from workers.gateway.errors import ApiError
from workers.gateway.json_fields import NULL, decode, size
from workers.gateway.limits import ApiLimits, S
from workers.gateway.requests import CompletionRequest, GenerationRequest
from workers.gateway.responses import ClientGone
from workers.linux import M_MMAP_THRESHOLD, mallopt

R = TypeVar("R", bound=GenerationRequest)

SMALL_BYTES = 64 << 10  # a body up to here needs no room of the common one: connections are limited, too
YOUNG_S = 2.0  # a body that has been sent for less is not given up in favour of another one
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


def give_memory_back() -> None:
    """Let large blocks be the kernel's again once they are freed. Of this process, and for good.

    Left alone, the C library learns from the first large body that such blocks are common, and keeps those that follow.
    """
    mallopt(M_MMAP_THRESHOLD, 1 << 20)


class _Body:
    """One body that is being read."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.began = time.monotonic()
        self.reading: asyncio.Task[bytearray] | None = None
        self.displaced = False

    @property
    def pace(self) -> float:
        """Bytes a second."""
        return len(self.data) / max(time.monotonic() - self.began, 1e-3)


class Bodies:
    """The bodies that are being read now."""

    def __init__(self, limits: ApiLimits) -> None:
        self._limits = limits
        self._one_at_a_time = asyncio.Lock()
        self._large: dict[_Body, None] = {}

    async def parsed(self, kind: type[R], request: Request) -> R:
        """The request in a body. Raises as `read` and `parse_body` do.

        A large one is parsed beside the loop, so that other answers go on, and one at a time: while it is looked at it
        may take some times its bytes.
        """
        body = await self.read(request)
        if len(body) <= SMALL_BYTES:
            return parse_body(kind, body)
        async with self._one_at_a_time:
            return await asyncio.to_thread(parse_body, kind, body)

    async def read(self, request: Request) -> bytearray:
        """The whole body. Raises ApiError (408, 413, 415, 429) or ClientGone."""
        _check_type(request)
        announced = request.headers.get("content-length", "")
        if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > self._most):
            raise self._too_large()
        body = _Body()
        body.reading = asyncio.create_task(self._read(request, body))
        try:
            async with asyncio.timeout(self._limits.body_ns / S):
                return await body.reading
        except ClientDisconnect:
            raise ClientGone from None
        except TimeoutError:
            limit_s = self._limits.body_ns / S
            raise ApiError(408, f"the body was not complete within {limit_s:.0f} s; send it again") from None
        except asyncio.CancelledError:
            if not body.displaced:
                raise
            raise ApiError(
                408, "the body came too slowly while others needed the memory; send it again", code="body_too_slow"
            ) from None
        finally:
            body.reading.cancel()
            self._large.pop(body, None)

    @property
    def _most(self) -> int:
        return self._limits.body_bytes

    async def _read(self, request: Request, body: _Body) -> bytearray:
        async for part in request.stream():
            if len(body.data) + len(part) > self._most:
                raise self._too_large()
            if len(body.data) + len(part) > SMALL_BYTES:
                self._take_room(body, len(part))
            body.data += part
        return body.data

    def _take_room(self, body: _Body, more: int) -> None:
        """Room for a part of a large body; the slowest one gives up its own. Raises ApiError (429)."""
        self._large[body] = None
        while sum(len(one.data) for one in self._large) + more > self._limits.bodies_bytes:
            now = time.monotonic()
            old = [one for one in self._large if now - one.began > YOUNG_S and not one.displaced and one is not body]
            if not old:
                raise ApiError(
                    429,
                    "too many large bodies are being sent at once; try again later",
                    kind="rate_limit_error",
                    code="overloaded",
                    retry_after_s=1,
                )
            slowest = min(old, key=lambda one: one.pace)
            slowest.displaced = True
            self._large.pop(slowest)
            slowest.data = bytearray()
            assert slowest.reading is not None
            slowest.reading.cancel()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body exceeds {self._most} bytes; send a shorter prompt")


def _check_type(request: Request) -> None:
    """Refuse what is called anything but JSON: a page of any site may post text or a form to this machine.

    A page can leave the type out as well, but a browser then names the page (`origins.py`); a program need not send it.
    """
    given = request.headers.get("content-type", "")
    kind = given.split(";", 1)[0].strip().lower()
    if given and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(
            415,
            f"Content-Type is {given[:100]!r}; send the header Content-Type: application/json",
            code="unsupported_media_type",
        )


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
    """Refuse megabytes of `{}` before they become objects. Text may be full of braces, which do not count."""
    data = bytes(messages).replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = data.count(b'"') // 2
    # without escaped ones, every second part between quotes is outside; as many texts as this belong to more objects
    found = b"".join(data.split(b'"')[::2]).count(b"{") if strings <= 20 * MAX_OBJECTS else strings // 20
    if found > MAX_OBJECTS:
        raise ApiError(400, f"messages has more than {MAX_OBJECTS} messages and parts; send fewer", param="messages")


def _check_utf8(body: bytes | bytearray) -> None:
    """Check the encoding in parts: as one text the body would take up to four times its bytes."""
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
