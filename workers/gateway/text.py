"""Text and log probabilities of an answer's tokens. Pure.

Text may be sent when its characters are whole, and never past a stop string. Log probabilities have OpenAI's two
shapes: lists side by side for completions, one object a token for chats.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

from workers.gateway.merge import MergedToken
from workers.models import Tokenizer
from workers.wire.messages import TokenLogprob

LEAST = -9999.0  # stands for minus infinity, which JSON does not have; OpenAI uses the same


class AnswerText:
    """Text of one answer, token by token. Holds back what may turn out to be the beginning of a stop string.

    A stop string is looked for in the text that is shown and in the text with every special token written out, so that
    "<|im_end|>" stops an answer which does not show it. The one that is complete first ends the answer, however the
    text was cut into tokens. With `with_stop` it belongs to the answer; with `special` special tokens are shown. In the
    first `at_least` tokens none is looked for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        with_stop: bool = False,
        special: bool = False,
        at_least: int = 0,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._special_text = tokenizer.special_text
        self._stops = stops
        self._with_stop = with_stop
        self._show_special = special
        self._unstoppable = at_least
        self._held: list[tuple[str, bool]] = []
        """Characters that are not out yet, and whether they are shown."""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Text that is certain after this token; empty, too, once a stop string was found."""
        special = self._special_text(token_id)
        text, shown = (special, self._show_special) if special else (self._detokenizer.push(token_id), True)
        if self._unstoppable > 0:
            self._unstoppable -= 1
            return text if shown else ""
        return self._release(text, shown)

    def flush(self) -> str:
        """The rest, at the end of the answer."""
        out = self._release(self._detokenizer.flush(), True)
        held, self._held = self._held, []
        return out if self.stopped else out + _shown(held)

    def _release(self, text: str, shown: bool) -> str:
        if self.stopped:
            return ""
        if not self._stops:
            return text if shown else ""
        held = self._held + [(character, shown) for character in text]
        whole = range(len(held))
        visible = [index for index in whole if held[index][1]]
        views = [whole] if len(visible) == len(held) else [whole, visible]
        ends = [end for view in views for end in _stops_in(held, view, self._stops)]
        if ends:
            end, start = min(ends)
            self.stopped = True
            self._held = []
            return _shown(held[: end if self._with_stop else start])
        keep = min((_beginning(held, view, self._stops) for view in views), default=len(held))
        self._held = held[keep:]
        return _shown(held[:keep])


def _shown(characters: Sequence[tuple[str, bool]]) -> str:
    return "".join([character for character, shown in characters if shown])


def _stops_in(held: Sequence[tuple[str, bool]], view: Sequence[int], stops: Sequence[str]) -> list[tuple[int, int]]:
    """End and beginning in the text of each stop string's first occurrence in `view` of it."""
    text = "".join([held[index][0] for index in view])
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return [(view[at + len(stop) - 1] + 1, view[at]) for at, stop in found]


def _beginning(held: Sequence[tuple[str, bool]], view: Sequence[int], stops: Sequence[str]) -> int:
    """Index in the text at which the longest proper beginning of a stop string starts that `view` of it ends with."""
    text = "".join([held[index][0] for index in view])
    keep = max(_overlap(text, stop) for stop in stops)
    return view[len(view) - keep] if keep else len(held)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class Logprobs(Protocol):
    """Builds one choice's `logprobs`, piece by piece."""

    def piece(self, tokens: Sequence[MergedToken]) -> dict[str, Any] | None:
        """Log probabilities of tokens that follow those of the last call."""
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
