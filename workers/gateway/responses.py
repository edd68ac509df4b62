"""An answer on its way to a client that may leave: as server-sent events, or whole, gathered within bounds.

When the client leaves, the work is cancelled, and with it everything on the workers. An answer that is not streamed is
kept as JSON and ids, not as objects of tokens: a token with twenty log probabilities is 10 kB of objects and 1 kB of
JSON; 128 choices of a few thousand are gigabytes.
"""

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from workers.gateway.answers import Answer, Counts, Piece, WholeChoice
from workers.gateway.errors import ApiError, broken
from workers.gateway.limits import ApiLimits

log = logging.getLogger(__name__)

TOKEN_BYTES = 32  # of JSON for a token's id, instance and text

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection before the answer."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ClientGone when the client leaves first."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events from a generator. However the response ends, the generator is closed, then `close` is called.

    A client that reads slowly holds the generator back.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            await self._events.aclose()
            await self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def events(
    first: Piece, rest: AsyncGenerator[Piece, None], answer: Answer, counts: Callable[[], Counts] | None
) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events, and after it its usage, if `counts` is given."""
    async with aclosing(rest):
        yield _event(answer.chunk(first))
        try:
            async for piece in rest:
                yield _event(answer.chunk(piece))
        except ApiError as error:  # the status is out: OpenAI's clients look for `error` in the events, too
            yield _event(error.body())
            return
        except Exception as error:
            log.exception("a streamed answer broke off")
            yield _event(broken(error).body())
            return
        if counts is not None:
            yield _event(answer.usage_chunk(counts()))
        yield b"data: [DONE]\n\n"


def _event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class _Growing:
    """One choice."""

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.texts: list[str] = []
        self.ids = array("I")
        self.instances: list[str] = []
        self.finish_reason = "stop"
        self.record: dict[str, Any] | None = None
        self.logprobs: dict[str, Any] | None = None

    def take(self, piece: Piece) -> int:
        """Returns how many bytes of JSON it is about."""
        size = TOKEN_BYTES * len(piece.tokens) + len(piece.text)
        if piece.prompt is not None:
            self.prompt = piece.prompt
        self.texts.append(piece.text)
        self.ids.extend(token.token_id for token in piece.tokens)
        self.instances += [token.instance for token in piece.tokens]
        if piece.finish_reason is not None:
            self.finish_reason, self.record = piece.finish_reason, piece.record
        for name, value in (piece.logprobs or {}).items():
            if self.logprobs is None:
                self.logprobs = {}
            if isinstance(value, list):
                parts = self.logprobs.setdefault(name, [])
                if value:
                    parts.append(msgspec.json.encode(value)[1:-1])
                    size += len(parts[-1])
            else:
                self.logprobs[name] = value
        return size

    def whole(self, index: int) -> WholeChoice:
        logprobs = self.logprobs
        if logprobs is not None:
            logprobs = {
                name: msgspec.Raw(b"[" + b",".join(value) + b"]") if isinstance(value, list) else value
                for name, value in logprobs.items()
            }
        self.logprobs = None
        text = "".join(self.texts)
        ids = self.ids.tolist()
        return WholeChoice(index, text, ids, self.instances, self.prompt, self.finish_reason, logprobs, self.record)


class Gathering:
    """All answers of a gateway that are not streamed and not complete."""

    def __init__(self, limits: ApiLimits) -> None:
        self._limits = limits
        self._held = 0

    async def gather(self, pieces: AsyncIterator[Piece], count: int) -> Sequence[WholeChoice]:
        """The choices, `count` of them, when all have ended. Raises ApiError (400, 429) when they grow too large."""
        growing, mine = [_Growing() for _ in range(count)], 0
        try:
            async for piece in pieces:
                size = growing[piece.index].take(piece)
                mine += size
                self._held += size
                self._check(mine)
            return [one.whole(index) for index, one in enumerate(growing)]
        finally:
            self._held -= mine

    def _check(self, mine: int) -> None:
        if mine > self._limits.answer_bytes:
            raise ApiError(
                400,
                f"the answer exceeds {self._limits.answer_bytes} bytes; ask for it with stream: true, or with a "
                "smaller n, max_tokens or logprobs",
                param="stream",
                code="answer_too_large",
            )
        if self._held > self._limits.answers_bytes:
            raise ApiError(
                429,
                "too many large answers are being made at once; try again later, or with stream: true",
                kind="rate_limit_error",
                code="overloaded",
                retry_after_s=5,
            )
