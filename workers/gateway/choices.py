"""One choice of an answer: waits for its turn, is submitted, and becomes pieces of text. And several side by side."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from workers.gateway.admission import Draining, Overloaded, Ticket
from workers.gateway.answers import Counts, Piece
from workers.gateway.attempts import LiveRequest, Taken
from workers.gateway.dispatcher import Dispatcher
from workers.gateway.errors import from_failure, refused
from workers.gateway.merge import MergedToken
from workers.gateway.text import AnswerText, Logprobs
from workers.policy import NoRoute
from workers.roles.request import RequestFailed
from workers.wire.frames import WireError
from workers.wire.messages import SamplingSpec


class Choice:
    """One prompt on its way to one answer. `live` is there from the moment its turn has come.

    `hide_stop`: the token that ends the answer, of those that may be generated, is not part of its text.
    `annotate` gets the request when it is live; `answered` the whole text and its ids when it has ended by itself.
    """

    def __init__(
        self,
        index: int,
        prompt: list[int],
        sampling: SamplingSpec,
        ticket: Ticket,
        text: AnswerText,
        logprobs: Logprobs,
        echoed: str = "",
        *,
        hide_stop: bool = True,
        annotate: Callable[[LiveRequest], None] = lambda _: None,
        answered: Callable[[str, list[int]], None] = lambda _text, _ids: None,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.logprobs = logprobs
        self.live: LiveRequest | None = None
        self._sampling = sampling
        self._ticket = ticket
        self._text = text
        self._echoed = echoed
        self._hide_stop = hide_stop
        self._annotate = annotate
        self._answered = answered
        self.completion_tokens = 0
        """Number of tokens in the pieces so far: what was delivered, not what has come."""
        self._arrived_ns = time.monotonic_ns()
        self._arrived = time.time()

    @property
    def counts(self) -> Counts:
        """Tokens of its prompt, and of the answer so far."""
        cached = self.live.log.cached_tokens if self.live is not None else 0
        return Counts(len(self.prompt), self.completion_tokens, cached)

    def close(self, dispatcher: Dispatcher) -> None:
        """Give the place back and stop the request, if that has not happened yet."""
        self._ticket.release()
        if self.live is not None:
            dispatcher.live.cancel(self.live, "the client has gone")

    async def pieces(self, dispatcher: Dispatcher, prefix: str) -> AsyncGenerator[Piece, None]:
        """The answer's pieces. Raises ApiError. Closing it cancels the request."""
        try:
            try:
                await self._ticket.admitted()
            except Overloaded as error:
                raise refused(error) from None
            async with dispatcher.submitting:  # 128 choices of a long prompt would hold up everybody's answers
                live = self._submit(dispatcher, prefix)
                await asyncio.sleep(0)
            stopped = RequestFailed(Draining.name, "the gateway is shutting down and could not wait for the answer")
            self._ticket.on_abandon = lambda: live.queue.put_nowait(stopped)
            async with aclosing(self._pieces(dispatcher, live)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._ticket.release()

    def _submit(self, dispatcher: Dispatcher, prefix: str) -> LiveRequest:
        try:
            live = dispatcher.submit(self.prompt, self._sampling, prefix, self._read)
        except (NoRoute, WireError) as error:
            raise from_failure(error.name, str(error)) from None
        live.log.gateway_queue_ns = live.log.start_ns - self._arrived_ns
        live.log.start_ns, live.log.start_time = self._arrived_ns, self._arrived  # what the client has waited since
        self.live = live
        self._annotate(live)
        return live

    async def _pieces(self, dispatcher: Dispatcher, live: LiveRequest) -> AsyncGenerator[Piece, None]:
        first = True
        texts, ids = [], list[int]()
        async with aclosing(dispatcher.taken(live)) as answer:
            try:
                async for text, tokens, finish_reason in answer:
                    texts.append(text)
                    ids += [token.token_id for token in tokens]
                    if finish_reason is not None:
                        self._answered("".join(texts), ids)
                    shown = self._echoed + text if first else text
                    record = live.log.record() if finish_reason is not None else None
                    self.completion_tokens = len(ids)
                    yield Piece(
                        self.index,
                        shown,
                        tokens,
                        self.prompt if first else None,
                        finish_reason,
                        self.logprobs.piece(tokens),
                        record,
                        self.counts,
                    )
                    first = False
            except RequestFailed as failure:
                raise from_failure(failure.name, str(failure)) from None

    def _read(self, tokens: list[MergedToken]) -> Taken:
        out = ""
        for count, token in enumerate(tokens, 1):
            if not (self._hide_stop and token.finish_reason == "stop"):
                out += self._text.push(token.token_id)
            if token.finish_reason is not None:
                out += self._text.flush()
            if self._text.stopped:
                return Taken(out, tokens[:count], "stop")
        return Taken(out, tokens, tokens[-1].finish_reason)


async def side_by_side(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """The pieces of all choices as they come. One that fails ends all; closing closes all.

    A slow reader holds every choice back: at most one piece of each waits here.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for piece in only:
                yield piece
        return
    # each choice waits until its piece is taken: a shared bounded queue would let a fast one push in before the others
    ready: asyncio.Queue[tuple[Piece | Exception | None, asyncio.Event]] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[Piece, None]) -> None:
        taken = asyncio.Event()
        end: Exception | None = None
        async with aclosing(stream):
            try:
                async for piece in stream:
                    ready.put_nowait((piece, taken))
                    await taken.wait()
                    taken.clear()
            except Exception as error:  # whatever it is: the reader must not wait for this choice for ever
                end = error
        ready.put_nowait((end, taken))

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(pumps)
        while left:
            item, taken = await ready.get()
            taken.set()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
