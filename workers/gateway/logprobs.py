"""Log probabilities in OpenAI's two shapes: lists side by side for completions, one object a token for chats. Pure."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

from workers.gateway.merge import MergedToken
from workers.gateway.text import AnswerText
from workers.models import Tokenizer
from workers.wire.messages import TokenLogprob

LEAST = -9999.0  # stands for minus infinity, which JSON does not have; OpenAI uses the same


class Logprobs(Protocol):
    """Builds one choice's `logprobs`, piece by piece."""

    def piece(self, tokens: Sequence[MergedToken]) -> dict[str, Any] | None:
        """Of tokens that follow those of the last call."""
        ...


class NoLogprobs:
    """Nobody asked."""

    def piece(self, tokens: Sequence[MergedToken]) -> None:
        return None


class CompletionLogprobs:
    """`tokens`, `token_logprobs`, `top_logprobs` and `text_offset`, lists of equal length.

    `text_offset` counts characters of the choice's text, in which special tokens are shown with `special`. With `top` 0
    the only one listed is the token itself. With `as_ids` tokens are named by their ids.
    """

    def __init__(self, tokenizer: Tokenizer, top: int, *, special: bool = False, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._as_ids = as_ids
        self._offset = 0
        self._text = AnswerText(tokenizer, special=special)

    def piece(self, tokens: Sequence[MergedToken]) -> dict[str, Any]:
        result: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token in tokens:
            chosen = _value(_of(token).logprob)
            likeliest = {self._name(other): _value(value) for other, value in _of(token).top[: self._top]}
            result["text_offset"].append(self._offset)
            result["token_logprobs"].append(chosen)
            result["tokens"].append(self._name(token.token_id))
            result["top_logprobs"].append(likeliest | {self._name(token.token_id): chosen})
            self._offset += len(self._text.push(token.token_id))
        return result

    def _name(self, token_id: int) -> str:
        """The token as text; `bytes:\\xe2` when its bytes are no text, and its id when it stands for none."""
        data = self._tokenizer.token_bytes(token_id)
        if not data or self._as_ids:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + _escaped(data)


class ChatLogprobs:
    """`content`: for each token its text, bytes, log probability and the `top` likeliest in its place.

    With `as_ids` its text is its id.
    """

    def __init__(self, tokenizer: Tokenizer, top: int, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._as_ids = as_ids

    def piece(self, tokens: Sequence[MergedToken]) -> dict[str, Any]:
        content = [
            self._entry(token.token_id, _of(token).logprob)
            | {"top_logprobs": [self._entry(*other) for other in _of(token).top[: self._top]]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        try:
            text = data.decode() if data and not self._as_ids else f"token_id:{token_id}"
        except UnicodeDecodeError:
            text = _escaped(data)
        return {"token": text, "logprob": _value(logprob), "bytes": list(data) if data else None}


def _of(token: MergedToken) -> TokenLogprob:
    # a token that was replayed from ids alone has none of its own: minus infinity would be a lie, and so would zero
    return token.logprob if token.logprob is not None else TokenLogprob(math.nan)


def _value(logprob: float) -> float | None:
    return None if math.isnan(logprob) else max(LEAST, logprob)


def _escaped(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)
