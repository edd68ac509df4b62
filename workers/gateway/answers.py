"""The JSON of answers: chunks and whole ones, for both endpoints. Pure."""

from dataclasses import dataclass
from typing import Any

from workers.gateway.merge import MergedToken


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that came together and the text that they completed. The last piece has a finish reason and the record."""

    text: str
    tokens: list[MergedToken]
    finish_reason: str | None = None
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


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Answer:
    """Builds the objects of one answer. Subclasses differ in what a choice looks like."""

    prefix = ""
    object = ""
    chunk_object = ""

    def __init__(self, request_id: str, model: str, created: int) -> None:
        self._base = {"id": request_id, "created": created, "model": model}

    def choice(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        """A chunk's choice."""
        raise NotImplementedError

    def whole_choice(self, text: str, finish_reason: str) -> dict[str, Any]:
        """The only choice of a whole answer."""
        raise NotImplementedError

    def chunk(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        return {
            **self._base,
            "object": self.chunk_object,
            "choices": [self.choice(piece, first=first)],
            "pdd": piece.pdd(),
        }

    def usage_chunk(self, counts: dict[str, Any]) -> dict[str, Any]:
        return {**self._base, "object": self.chunk_object, "choices": [], "usage": counts}

    def whole(self, pieces: list[Piece], counts: dict[str, Any]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.tokens]
        return {
            **self._base,
            "object": self.object,
            "choices": [self.whole_choice(text, pieces[-1].finish_reason or "stop")],
            "usage": counts,
            "pdd": {
                "token_ids": [token.token_id for token in tokens],
                "instances": [token.instance for token in tokens],
                "record": pieces[-1].record,
            },
        }


class CompletionAnswer(Answer):
    prefix = "cmpl"
    object = chunk_object = "text_completion"

    def choice(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        return {"index": 0, "text": piece.text, "logprobs": None, "finish_reason": piece.finish_reason}

    def whole_choice(self, text: str, finish_reason: str) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


class ChatAnswer(Answer):
    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        delta: dict[str, str] = {"role": "assistant"} if first else {}
        if piece.text or not piece.finish_reason:
            delta["content"] = piece.text
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": piece.finish_reason}

    def whole_choice(self, text: str, finish_reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
