"""A prompt's KV as it comes into being: how much of it is final, and in the end the first token. Owns no blocks.

One source feeds every transfer of a prompt. With `kv_send: after-prefill` it is finished before the first of them
begins; with `chunked` transfers follow it while prefill computes.
"""

import asyncio
from dataclasses import dataclass

from workers.wire.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class First:
    """The token that prefill sampled from the prompt's last position."""

    token: int
    finish_reason: str | None = None
    logprob: TokenLogprob | None = None


class KvSource:
    """The KV of `tokens` tokens, of which the first `ready` are final (in a cache, say) from the beginning."""

    def __init__(self, tokens: int, ready: int = 0) -> None:
        self.tokens = tokens
        self.ready = ready
        self.first: First | None = None
        """The first token, once the whole prompt is computed."""
        self._change: asyncio.Future[None] | None = None

    @classmethod
    def finished(cls, tokens: int, first: First) -> "KvSource":
        """A source that has everything."""
        source = cls(tokens)
        source.finish(first)
        return source

    def advance(self, ready: int) -> None:
        """The first `ready` tokens' KV is final. It never becomes less."""
        ready = min(ready, self.tokens)
        if ready > self.ready:
            self.ready = ready
            self._tell()

    def finish(self, first: First) -> None:
        """Everything is final, and prefill has sampled the first token."""
        self.ready = self.tokens
        self.first = first
        self._tell()

    def changed(self) -> "asyncio.Future[None]":
        """Done at the next `advance` or `finish`. Shared: never cancel it (`asyncio.wait` does not)."""
        if self._change is None:
            self._change = asyncio.get_running_loop().create_future()
        return self._change

    def _tell(self) -> None:
        change, self._change = self._change, None
        if change is not None:
            change.set_result(None)
