"""The JSON of answers: chunks and whole ones, for both endpoints. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.gateway.merge import MergedToken


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one choice that came together, and the text that they completed.

    A choice's last piece has a finish reason and the record of its request.
    """

    index: int
    text: str
    tokens: list[MergedToken]
    first: bool = False
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None
    record: dict[str, Any] | None = None

    def pdd(self) -> dict[str, Any]:
        """The extension that says who made which tokens. Clients that do not know it skip it."""
        pdd: dict[str, Any] = {}
        if self.tokens:
            pdd["instance"] = self.tokens[0].instance
            pdd["position"] = self.tokens[0].position
            pdd["token_ids"] = [token.token_id for token in self.tokens]
        if self.record is not None:
            pdd["record"] = self.record
        return pdd


@dataclass(frozen=True, slots=True)
class WholeChoice:
    """One choice of an answer that was not streamed."""

    index: int
    text: str
    tokens: list[MergedToken]
    finish_reason: str
    logprobs: dict[str, Any] | None
    record: dict[str, Any] | None

    def pdd(self) -> dict[str, Any]:
        return {
            "token_ids": [token.token_id for token in self.tokens],
            "instances": [token.instance for token in self.tokens],
            "record": self.record,
        }


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Answer:
    """Builds the objects of one answer. Subclasses differ in what a choice looks like.

    `with_usage`: the stream ends with a chunk of usage, and every other chunk says that it has none.
    """

    prefix = ""
    object = ""
    chunk_object = ""

    def __init__(self, request_id: str, model: str, created: int, *, with_usage: bool = False) -> None:
        self._base = {"id": request_id, "created": created, "model": model}
        self._no_usage = {"usage": None} if with_usage else {}

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A chunk's choice."""
        raise NotImplementedError

    def whole_choice(self, choice: WholeChoice) -> dict[str, Any]:
        """A choice of a whole answer."""
        raise NotImplementedError

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return {
            **self._base,
            "object": self.chunk_object,
            "choices": [self.choice(piece)],
            **self._no_usage,
            "pdd": piece.pdd(),
        }

    def usage_chunk(self, counts: dict[str, Any]) -> dict[str, Any]:
        return {**self._base, "object": self.chunk_object, "choices": [], "usage": counts}

    def whole(self, choices: Sequence[WholeChoice], counts: dict[str, Any]) -> dict[str, Any]:
        """The whole answer. `pdd` is that of the first choice, and holds all of them where there are several."""
        pdd = choices[0].pdd()
        if len(choices) > 1:
            pdd["choices"] = [choice.pdd() for choice in choices]
        return {
            **self._base,
            "object": self.object,
            "choices": [self.whole_choice(choice) for choice in choices],
            "usage": counts,
            "pdd": pdd,
        }


class CompletionAnswer(Answer):
    prefix = "cmpl"
    object = chunk_object = "text_completion"

    def choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
        }

    def whole_choice(self, choice: WholeChoice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
        }


class ChatAnswer(Answer):
    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, str] = {"role": "assistant"} if piece.first else {}
        if piece.text or not piece.finish_reason:
            delta["content"] = piece.text
        return {
            "index": piece.index,
            "delta": delta,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
        }

    def whole_choice(self, choice: WholeChoice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
        }
