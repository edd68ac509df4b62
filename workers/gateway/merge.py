"""Tokens from several instances become one answer: by position, exactly once, in order, no gap. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from workers.wire.messages import TokenLogprob


@dataclass(frozen=True, slots=True)
class MergedToken:
    """One token of the answer and who made it. The last one carries the finish reason."""

    position: int
    token_id: int
    instance: str
    finish_reason: str | None = None
    logprob: TokenLogprob | None = None


class MergeConflict(Exception):
    """Two instances disagree: about a token, or about where the answer ends. One of them has broken state."""

    name = "merge_conflict"


class PositionMerge:
    """Collects tokens from position `start` on. What has been returned by `offer` is final."""

    def __init__(self, start: int) -> None:
        self._next = start
        self._waiting: dict[int, MergedToken] = {}
        self._delivered: list[int] = []
        self._start = start
        self._end: int | None = None  # one past the last position, once known

    @property
    def finished(self) -> bool:
        """The whole answer has been returned."""
        return self._next == self._end

    @property
    def delivered(self) -> list[int]:
        """The answer's token ids so far: what `offer` has returned."""
        return list(self._delivered)

    @property
    def gap(self) -> bool:
        """Later tokens are here while an earlier one is missing."""
        return bool(self._waiting)

    def restart(self) -> None:
        """Forget what lies behind a gap, and where the answer ends: it is made again from where it is."""
        self._waiting.clear()
        self._end = None

    def offer(
        self,
        position: int,
        ids: list[int],
        finish_reason: str | None,
        instance: str,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> list[MergedToken]:
        """Take tokens at consecutive positions; return those that are now in order (perhaps none).

        A token that is here already is dropped. Raises MergeConflict, taking nothing, when it differs, or
        lies beyond the end.
        """
        last = position + len(ids) - 1
        if position < self._start:
            raise MergeConflict(f"{instance} sent position {position}, inside the prompt of {self._start} tokens")
        end = self._end
        if finish_reason is not None:
            if end not in (None, last + 1):
                raise MergeConflict(f"{instance} ends the answer at {last}, another instance at {end}")
            end = last + 1
        if end is not None and max([last, self._next - 1, *self._waiting]) >= end:
            raise MergeConflict(f"the answer ends before position {end}, but {instance} went on")
        tokens = []
        for offset, token_id in enumerate(ids):
            ends = finish_reason if offset == len(ids) - 1 else None
            logprob = logprobs[offset] if offset < len(logprobs) else None
            tokens.append(MergedToken(position + offset, token_id, instance, ends, logprob))
            self._check(tokens[-1])
        self._end = end
        for token in tokens:
            if token.position >= self._next:
                self._waiting.setdefault(token.position, token)
        ready = []
        while (following := self._waiting.pop(self._next, None)) is not None:
            self._delivered.append(following.token_id)
            self._next += 1
            ready.append(following)
        return ready

    def _check(self, token: MergedToken) -> None:
        if token.position < self._next:
            known = self._delivered[token.position - self._start]
        else:
            known = self._waiting.get(token.position, token).token_id
        if known != token.token_id:
            raise MergeConflict(
                f"position {token.position} is token {known} and, says {token.instance}, {token.token_id}"
            )
