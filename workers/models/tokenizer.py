"""Text to token ids and back. Owns tokenizers, the streaming detokenizer and chat templates; knows no
weights.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from workers.models.chat import ChatTemplate, Messages

BOS, EOS, BYTE_VOCAB = 256, 257, 258

_BYTE_CHAT = ChatTemplate(
    {
        "default": "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    },
    {},
    "tiny",
)


class Tokenizer(Protocol):
    """What every model's tokenizer can do."""

    eos_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens written out in it become their ids."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out; bytes that are no UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for: empty for special tokens and ids outside the vocabulary."""
        ...

    def special_text(self, token_id: int) -> str:
        """How a special token is written, which `token_bytes` has nothing of; empty for every other token."""
        ...

    def detokenizer(self) -> Detokenizer:
        """A fresh streaming decoder."""
        ...

    def apply_chat_template(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Ids of the prompt for `messages` ({"role", "content", ...}), ending where the assistant begins.

        Arguments as in transformers' method of this name; `variables` are the template's own. Raises ChatRefusal when
        the template refuses the messages, TemplateFault when it fails.
        """
        ...


class Detokenizer:
    """Decodes one answer token by token; never emits half a character.

    The concatenation of all `push` results and the final `flush` equals `decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that became complete with this token, perhaps empty."""
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """What an unfinished character leaves at the end: U+FFFD or nothing."""
        return self._utf8.decode(b"", final=True)


def valid_text(text: str) -> str:
    """`text` with lone surrogates, which JSON can carry and UTF-8 cannot, replaced by question marks."""
    return text.encode("utf-8", "replace").decode()


class ByteTokenizer:
    """One token a byte of UTF-8, plus one for the beginning and one for the end of a text."""

    eos_ids = frozenset({EOS})

    def encode(self, text: str) -> list[int]:
        return [BOS, *valid_text(text).encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if 0 <= token_id < 256 else b""

    def special_text(self, token_id: int) -> str:
        return {BOS: "<bos>", EOS: "<eos>"}.get(token_id, "")

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self)

    def apply_chat_template(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        return self.encode(_BYTE_CHAT.render(messages, tools, documents, add_generation_prompt, **variables))
