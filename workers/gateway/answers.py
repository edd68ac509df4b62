"""The JSON of answers: chunks and whole ones, for both endpoints. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from workers.gateway.merge import MergedToken


class Counts(NamedTuple):
    """Tokens of a prompt and of its answer, as they were delivered."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


NOTHING = Counts()


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one choice that came together, and the text that they completed.

    A choice's first piece has its prompt, the last one a finish reason and the record of its request.
    """

    index: int
    text: str
    tokens: list[MergedToken]
    prompt: list[int] | None = None
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None
    record: dict[str, Any] | None = None
    counts: Counts = NOTHING

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
    ids: list[int]
    instances: list[str]
    prompt: list[int]
    finish_reason: str
    logprobs: dict[str, Any] | None
    record: dict[str, Any] | None

    def pdd(self) -> dict[str, Any]:
        return {"token_ids": self.ids, "instances": self.instances, "record": self.record}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parts of an answer beside its text that a client wants.

    `usage`: the stream ends with a chunk of usage; `continuous_usage`: every other chunk tells its choice's so far,
    instead of saying that it has none. `token_ids`: the ids of prompt and answer, where vLLM puts them.
    """

    usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False


class Answer:
    """Builds the objects of one answer. Subclasses differ in what a choice looks like."""

    prefix = ""
    object = ""
    chunk_object = ""

    def __init__(self, request_id: str, model: str, created: int, wanted: Wanted = Wanted()) -> None:
        self._base = {"id": request_id, "created": created, "model": model}
        self._wanted = wanted

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A chunk's choice."""
        raise NotImplementedError

    def whole_choice(self, choice: WholeChoice) -> dict[str, Any]:
        """A choice of a whole answer."""
        raise NotImplementedError

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """A chunk of a stream. There is none before the first token: a client's TTFT is that token's time."""
        body: dict[str, Any] = {
            **self._base,
            "object": self.chunk_object,
            "choices": [self.choice(piece)],
            "pdd": piece.pdd(),
        }
        if self._wanted.usage:
            body["usage"] = piece.counts.usage() if self._wanted.continuous_usage else None
        if self._wanted.token_ids:
            body["choices"][0]["token_ids"] = [token.token_id for token in piece.tokens]
            if piece.prompt is not None:
                self._with_prompt(body, 0, piece.prompt)
        return body

    def usage_chunk(self, counts: Counts) -> dict[str, Any]:
        return {**self._base, "object": self.chunk_object, "choices": [], "usage": counts.usage()}

    def whole(self, choices: Sequence[WholeChoice], counts: Counts) -> dict[str, Any]:
        """The whole answer. `pdd` is that of the first choice, and holds all of them where there are several."""
        pdd = choices[0].pdd()
        if len(choices) > 1:
            pdd["choices"] = [choice.pdd() for choice in choices]
        body: dict[str, Any] = {
            **self._base,
            "object": self.object,
            "choices": [self.whole_choice(choice) for choice in choices],
            "usage": counts.usage(),
            "pdd": pdd,
        }
        if self._wanted.token_ids:
            for number, choice in enumerate(choices):
                body["choices"][number]["token_ids"] = choice.ids
                self._with_prompt(body, number, choice.prompt)
        return body

    def _with_prompt(self, body: dict[str, Any], number: int, prompt: list[int]) -> None:
        """Put the prompt's ids into an answer or chunk, for the choice at `number` of it."""
        raise NotImplementedError


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

    def _with_prompt(self, body: dict[str, Any], number: int, prompt: list[int]) -> None:
        body["choices"][number]["prompt_token_ids"] = prompt


class ChatAnswer(Answer):
    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, str] = {} if piece.prompt is None else {"role": "assistant"}
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

    def _with_prompt(self, body: dict[str, Any], number: int, prompt: list[int]) -> None:
        body["prompt_token_ids"] = prompt
