"""One generation from a checked request to its answer: tokenise, submit, pieces of text, SSE or a whole answer."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import Request, Response

from workers.gateway.answers import Answer, ChatAnswer, CompletionAnswer, Piece, usage
from workers.gateway.conversations import Conversations
from workers.gateway.disconnect import EventStream, unless_gone
from workers.gateway.dispatcher import Dispatcher, LiveRequest
from workers.gateway.errors import ApiError, from_failure
from workers.gateway.requests import ChatRequest, CompletionRequest, GenerationRequest
from workers.gateway.text import AnswerText
from workers.models import ModelError
from workers.policy import NoRoute
from workers.roles.worker import RequestFailed
from workers.wire.frames import WireError
from workers.wire.messages import SamplingSpec

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
LONG_TEXT = 20_000  # characters: tokenised on another thread, so that other answers keep streaming


class Generation:
    """Answers requests of both endpoints through one dispatcher."""

    def __init__(self, dispatcher: Dispatcher, model_id: str) -> None:
        self._dispatcher = dispatcher
        self._loaded = dispatcher.loaded
        self._conversations = Conversations(dispatcher.loaded.tokenizer.eos_ids)
        self.model_id = model_id

    async def completion(self, request: Request, asked: CompletionRequest) -> Response:
        """Answer /v1/completions. Raises ApiError."""
        self._check_model(asked.model)
        given = asked.single_prompt
        prompt = await self._encode(given) if isinstance(given, str) else given
        return await self._answer(
            request, asked, prompt, asked.max_tokens or DEFAULT_COMPLETION_TOKENS, CompletionAnswer
        )

    async def chat(self, request: Request, asked: ChatRequest) -> Response:
        """Answer /v1/chat/completions. Raises ApiError."""
        self._check_model(asked.model)
        try:
            messages = asked.plain_messages
            prompt = self._loaded.tokenizer.apply_chat_template(messages)
        except ModelError as error:
            raise ApiError(400, str(error), param="messages") from None
        max_tokens = asked.max_completion_tokens or asked.max_tokens
        return await self._answer(request, asked, prompt, max_tokens, ChatAnswer, messages)

    # -- the request -------------------------------------------------------------------------------------------

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in (self.model_id, self._loaded.config.name):
            raise ApiError(
                404,
                f"the model {name!r} does not exist here; this lab serves {self.model_id!r}",
                param="model",
                code="model_not_found",
            )

    async def _encode(self, text: str) -> list[int]:
        encode = self._loaded.tokenizer.encode
        return await asyncio.to_thread(encode, text) if len(text) > LONG_TEXT else encode(text)

    def _check_prompt(self, prompt: list[int], max_tokens: int | None) -> int:
        """The number of tokens that may be generated. Raises ApiError."""
        config = self._loaded.config
        if not prompt:
            raise ApiError(400, "the prompt is empty; give at least one token", param="prompt")
        bad = next((token for token in prompt if not 0 <= token < config.vocab), None)
        if bad is not None:
            raise ApiError(
                400,
                f"token {bad} is not in the vocabulary of {self.model_id} (0 to {config.vocab - 1})",
                param="prompt",
            )
        room = config.context_length - len(prompt)
        wanted = max(1, room) if max_tokens is None else max_tokens
        if wanted > room:
            raise ApiError(
                400,
                f"This model's maximum context length is {config.context_length} tokens. However, you requested "
                f"{len(prompt) + wanted} tokens ({len(prompt)} in the prompt, {wanted} in the completion). "
                "Please reduce the length of the prompt or completion.",
                param="prompt" if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        return wanted

    def _submit(self, asked: GenerationRequest, prompt: list[int], max_tokens: int, prefix: str) -> LiveRequest:
        temperature = 1.0 if asked.temperature is None else asked.temperature
        seed = secrets.randbits(63) if asked.seed is None else asked.seed % (1 << 63)
        sampling = SamplingSpec(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            seed=seed if temperature > 0 else None,
            ignore_eos=bool(asked.ignore_eos),
            stop_token_ids=asked.stop_token_ids or [],
        )
        try:
            return self._dispatcher.submit(prompt, sampling, prefix)
        except (NoRoute, WireError) as error:
            raise from_failure(error.name, str(error)) from None

    # -- the answer --------------------------------------------------------------------------------------------

    async def _answer(
        self,
        request: Request,
        asked: GenerationRequest,
        prompt: list[int],
        max_tokens: int | None,
        kind: type[Answer],
        messages: list[dict[str, str]] | None = None,
    ) -> Response:
        allowed = self._check_prompt(prompt, max_tokens)
        live = self._submit(asked, prompt, allowed, kind.prefix)
        if messages is not None:
            live.log.retokenised = self._conversations.retokenised(messages, prompt)
        answer = kind(live.spec.id, self.model_id, int(time.time()))
        text = AnswerText(self._loaded.tokenizer.detokenizer(), asked.stops)
        pieces = self._pieces(live, text, messages)
        if asked.stream:
            # the status line waits for the first token: a request that fails before it gets the status it deserves
            first = await unless_gone(request, _first(pieces))
            return EventStream(self._events(first, pieces, answer, live, asked.include_usage))
        whole = await unless_gone(request, _all(pieces))
        body = answer.whole(whole, _usage(live))
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def _pieces(
        self, live: LiveRequest, text: AnswerText, messages: list[dict[str, str]] | None
    ) -> AsyncGenerator[Piece, None]:
        """The answer's pieces. Raises ApiError. Closing it cancels the request."""
        whole: list[str] = []
        ids = list(live.spec.prompt)
        async with aclosing(self._dispatcher.tokens(live)) as answer:
            try:
                async for tokens in answer:
                    finish_reason = tokens[-1].finish_reason
                    out = "".join(text.push(token.token_id) for token in tokens)
                    if finish_reason is not None:
                        out += text.flush()
                    whole.append(out)
                    ids += [token.token_id for token in tokens]
                    if text.stopped:
                        finish_reason = "stop"
                        self._dispatcher.cancel(live, "stop string", finish_reason="stop")
                    elif finish_reason is not None and messages is not None:
                        self._conversations.note(messages, "".join(whole), ids)
                    record = live.log.record() if finish_reason is not None else None
                    yield Piece(out, tokens, finish_reason, record)
                    if finish_reason is not None:
                        return
            except RequestFailed as failure:
                raise from_failure(failure.name, str(failure)) from None

    async def _events(
        self, first: Piece, rest: AsyncGenerator[Piece, None], answer: Answer, live: LiveRequest, include_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(rest):
            yield _event(answer.chunk(first, first=True))
            try:
                async for piece in rest:
                    yield _event(answer.chunk(piece, first=False))
            except ApiError as error:  # the status is out: OpenAI's clients look for `error` in the events, too
                yield _event(error.body())
                return
            if include_usage:
                yield _event(answer.usage_chunk(_usage(live)))
            yield b"data: [DONE]\n\n"


def _usage(live: LiveRequest) -> dict[str, Any]:
    return usage(len(live.spec.prompt), len(live.log.token_ns), live.log.cached_tokens)


async def _first(pieces: AsyncIterator[Piece]) -> Piece:
    """`anext` as a coroutine."""
    return await anext(pieces)


async def _all(pieces: AsyncIterator[Piece]) -> list[Piece]:
    return [piece async for piece in pieces]


def _event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
