"""Prompts: token ids of text and messages that fit the model, and of a chat's earlier answers as they were generated.

Long texts are tokenised off the loop, and those that are too long are refused.

A client sends an answer back as text. Tokenised again it may differ from what was generated (a word split another way,
bytes that were no character), and from there on no cache matches, although to the client nothing looks wrong. So the
ids of answered chats are kept, and where the text of a next turn's prompt is the text that they stand for, they take
its place; where it is not, the mismatch is counted.
"""

import asyncio
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import xxhash

from workers.cache.hashing import token_bytes
from workers.gateway.errors import SERVER_ERROR, ApiError
from workers.models import ChatRefusal, LoadedModel, TemplateFault, Tokenizer

LONG_TEXT = 20_000  # characters: tokenised on another thread, so that other answers keep streaming
MESSAGE_COST = 100  # characters of text that take a template and a tokenizer as long as a message does
MAX_TOKEN_BYTES = 256  # no vocabulary has longer ones; so much longer than the context, a text need not be tokenised
REMEMBERED_TOKENS = 4_000_000  # 16 MB; each conversation counts twice, as its ids and as its template's


class Prompts:
    """Token ids of one model. Every method raises ApiError for what does not fit."""

    def __init__(self, loaded: LoadedModel, model_id: str) -> None:
        self._tokenizer = loaded.tokenizer
        self._config = loaded.config
        self._most = loaded.defaults.max_tokens
        self._model_id = model_id

    async def of_text(self, text: str) -> list[int]:
        self._check_length(len(text), "prompt")
        encode = self._tokenizer.encode
        return await asyncio.to_thread(encode, text) if len(text) > LONG_TEXT else encode(text)

    async def of_messages(
        self, messages: list[dict[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of messages in the model's chat template; `variables` is what else it gets."""
        length = sum(len(message["content"]) for message in messages)
        self._check_length(length, "messages")
        apply = partial(self._tokenizer.apply_chat_template, messages, **(variables or {}))
        try:
            heavy = bool(variables) or length + MESSAGE_COST * len(messages) > LONG_TEXT
            return await asyncio.to_thread(apply) if heavy else apply()
        except ChatRefusal as error:
            raise ApiError(400, str(error), param="messages") from None
        except TemplateFault as error:  # the model's own fault, unless the client gave the template variables
            if variables:
                told = f"the chat template fails with {', '.join(sorted(variables))}: {error}"
                raise ApiError(400, told[:1000], param="chat_template_kwargs") from None
            raise ApiError(500, str(error), kind=SERVER_ERROR) from None

    def check(self, prompt: list[int], param: str, keep: int | None = None) -> None:
        """Check that it is not empty, of this vocabulary, and that its last `keep` tokens leave room for an answer."""
        if not prompt:
            raise ApiError(400, "the prompt is empty; give at least one token", param=param)
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self._config.vocab:
            bad = low if low < 0 else high
            shown = str(bad) if abs(bad) < 10**18 else "of more than 18 digits"
            raise ApiError(
                400,
                f"token {shown} is not in the vocabulary of {self._model_id} (0 to {self._config.vocab - 1})",
                param=param,
            )
        count = len(prompt) if keep is None else min(keep, len(prompt))
        if count >= self._config.context_length:
            raise self._too_long(f"{count + 1} tokens ({count} in the prompt, 1 in the completion)", param)

    def answer_tokens(self, prompt: list[int], max_tokens: int | None) -> int:
        """Number of tokens to generate: as asked for, or the model's default within what the context leaves."""
        room = self._config.context_length - len(prompt)
        wanted = min(room, self._most or room) if max_tokens is None else max_tokens
        if wanted > room:
            raise self._too_long(
                f"{len(prompt) + wanted} tokens ({len(prompt)} in the prompt, {wanted} in the completion)", "max_tokens"
            )
        return wanted

    def _check_length(self, characters: int, param: str) -> None:
        """Refuse a text that cannot fit before minutes go into its tokens."""
        least = characters // MAX_TOKEN_BYTES
        if least > self._config.context_length:
            raise self._too_long(f"a prompt of at least {least} tokens", param)

    def _too_long(self, requested: str, param: str) -> ApiError:
        return ApiError(
            400,
            f"This model's maximum context length is {self._config.context_length} tokens. However, you requested "
            f"{requested}. Please reduce the length of the prompt or completion.",
            param=param,
            code="context_length_exceeded",
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat's prompt. `template`: as the tokenizer makes it of the messages; `ids`: with kept answers put in place.

    `spliced`: tokens of the latest known turn that stand where re-tokenised ones would; `retokenised`: those that are
    others in `ids` now, and so for every cache. Both None: no earlier turn is known.
    """

    ids: list[int]
    template: list[int]
    spliced: int | None = None
    retokenised: int | None = None


@dataclass(frozen=True, slots=True)
class _Turn:
    """An answered chat: prompt and answer as ids, without an end-of-text token; the template's prompt; the answer."""

    ids: "array[int]"
    template: "array[int]"
    answer: bytes

    @property
    def weight(self) -> int:
        return len(self.ids) + len(self.template)


class Conversations:
    """Token ids of answered chats, by their messages."""

    def __init__(self, tokenizer: Tokenizer, remembered_tokens: int = REMEMBERED_TOKENS) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._eos_ids: Collection[int] = tokenizer.eos_ids
        self._room = remembered_tokens
        self._known: OrderedDict[bytes, _Turn] = OrderedDict()

    def note(
        self,
        messages: Sequence[Mapping[str, Any]],
        prompt: Prompt,
        answer: str,
        ids: Sequence[int],
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """A chat of `messages` was answered with `answer`, generated as `ids`.

        A stop string cuts the text somewhere in the ids: what lies behind it is not kept.
        """
        text = answer.encode("utf-8", "surrogatepass")
        kept = list(ids[:-1] if ids and ids[-1] in self._eos_ids else ids)
        raw = b"".join(map(self._token_bytes, kept))
        if raw.decode("utf-8", "replace").encode() != text:  # as a client is sent it; not so where it was cut
            while len(raw) > len(text):
                raw = raw[: len(raw) - len(self._token_bytes(kept.pop()))]
            if raw != text:
                return  # cut in the middle of a token: no ids stand for this text
        key = _keys([*messages, {"role": "assistant", "content": answer}], variables)[-1]
        self._forget(key)
        turn = _Turn(array("I", [*prompt.ids, *kept]), array("I", prompt.template), text)
        self._known[key] = turn
        self._room -= turn.weight
        while self._room < 0:
            self._forget(next(iter(self._known)))

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: list[int],
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt of a chat that the tokenizer would make `template`, of the messages and what else it gets."""
        turn = self._latest(messages, variables)
        if turn is None:
            return Prompt(template, template)
        count = len(turn.ids)
        if template[:count] == turn.ids.tolist():
            return Prompt(template, template, 0, 0)
        behind = self._end_of(turn, template)
        if behind is None:
            return Prompt(template, template, 0, count - _common(turn.ids, array("I", template)))
        ids = [*turn.ids, *template[behind:]]
        return Prompt(ids, template, count - _common(turn.ids, array("I", template)), 0)

    def _latest(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None) -> _Turn | None:
        for key, message in zip(reversed(_keys(messages, variables)[:-1]), reversed(messages[:-1]), strict=True):
            turn = self._known.get(key) if message["role"] == "assistant" else None
            if turn is not None:
                self._known.move_to_end(key)
                return turn
        return None

    def _end_of(self, turn: _Turn, template: list[int]) -> int | None:
        """Number of tokens of `template` that are the text of the turn, prompt and answer; None: it is another text.

        Also None when the text ends inside a token.
        """
        shared = _common(turn.template, array("I", template))
        text = b"".join(map(self._visible, turn.template[shared:])) + turn.answer
        ends = [0]
        for token in template[shared:]:
            if ends[-1] >= len(text):
                break
            ends.append(ends[-1] + len(self._visible(token)))
        count = bisect_left(ends, len(text))
        if count == len(ends) or ends[count] != len(text):
            return None
        same = b"".join(map(self._visible, template[shared : shared + count])) == text
        return shared + count if same else None

    def _visible(self, token: int) -> bytes:
        """A token's bytes; of one without text (a special token) a mark that no text contains."""
        return self._token_bytes(token) or b"\xff%d\xff" % token

    def _forget(self, key: bytes) -> None:
        turn = self._known.pop(key, None)
        if turn is not None:
            self._room += turn.weight


def _keys(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None) -> list[bytes]:
    """Names of the chat up to and with each message; in one pass, as chats are of thousands of messages."""
    keys = []
    hasher = xxhash.xxh3_128(_canonical(variables or {}))
    for message in messages:
        data = _canonical(message)
        hasher.update(token_bytes([len(data)]))
        hasher.update(data)
        keys.append(hasher.digest())
    return keys


def _canonical(fields: Mapping[str, Any]) -> bytes:
    # what a client sends back with its own answer may name fields that are empty
    return msgspec.msgpack.encode({name: fields[name] for name in sorted(fields) if fields[name] not in (None, [], {})})


def _common(left: "array[int]", right: "array[int]") -> int:
    """Length of the common beginning."""
    count = min(len(left), len(right))
    if left[:count] == right[:count]:
        return count
    return next(index for index in range(count) if left[index] != right[index])
