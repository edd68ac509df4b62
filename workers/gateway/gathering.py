"""Answers that are not streamed, while they grow: JSON and ids are kept, objects of tokens are not, all within bounds.

A token with twenty log probabilities is 10 kB of objects and 1 kB of JSON; 128 choices of a few thousand are gigabytes.
"""

from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from workers.gateway.answers import Piece, WholeChoice
from workers.gateway.errors import ApiError
from workers.gateway.limits import ApiLimits

TOKEN_BYTES = 32  # of JSON for a token's id, instance and text


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
