"""One request's tokens and how far their KV is computed. Owns no memory: `blocks` are names in a pool."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from workers.engine.sampling import Sampling, TokenCounts

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Generated:
    """A token the engine has chosen; `position` is its index in the sequence's `tokens`.

    `top_logprobs`, when the sampling asks for `logprobs`: that many (token, log probability), the likeliest first.
    Neither it nor `logprob` is there where nothing was sampled.
    """

    token_id: int
    position: int
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None


@dataclass(eq=False)
class Sequence:
    """`tokens` are all tokens known: the prompt, then the answer. KV of `tokens[:computed]` is in `blocks`.

    A freshly sampled token has no KV yet: after a step `computed == len(tokens) - 1`.
    """

    id: str
    tokens: list[int]
    prompt_len: int
    sampling: Sampling = field(default_factory=Sampling)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    """The part of `computed` that a cache had when the sequence got its blocks."""
    finish_reason: FinishReason | None = None
    drafted: int = 0
    accepted: int = 0
    """Those of the `drafted` tokens, guessed ahead, that the model chose itself."""

    preempted: int = 0
    """Number of times that its blocks were taken away while it decoded."""
    counts: TokenCounts | None = None
    """Counts of the tokens so far, for penalties."""
    spoilt: bool = False
    """Computing it has failed: nobody may use its KV."""

    @property
    def pending(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def last(self) -> Generated:
        """The last known token, as an answer token."""
        return Generated(self.tokens[-1], len(self.tokens) - 1, self.finish_reason)

    def forget(self, length: int) -> None:
        """Takes back the tokens from position `length` on: they were guessed. Not while the sequence is computed."""
        del self.tokens[length:]
        self.computed = min(self.computed, length)
        self.finish_reason = None
        self.counts = None

    def note_finish(self, eos_ids: Collection[int], context_length: int) -> None:
        """Sets `finish_reason` when the last token, if it belongs to the answer, ends it."""
        answered = len(self.tokens) - self.prompt_len
        if answered < 1:
            return
        last = self.tokens[-1]
        if last in self.sampling.stop_token_ids or (last in eos_ids and not self.sampling.ignore_eos):
            self.finish_reason = "stop"
        elif answered >= self.sampling.max_tokens or len(self.tokens) >= context_length:
            self.finish_reason = "length"
