"""Text to token ids and back: the tokenizer of bytes, trained ones (`tokenizers` package), the streaming detokenizer.
Knows no weights.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer as RawTokenizer

from workers.models.chat import ChatRefusal, ChatTemplate, Messages

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
    """A model's tokenizer."""

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
        """The text of a special token, which `token_bytes` has nothing of; empty for every other token."""
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
        """The text that an unfinished character leaves at the end: U+FFFD or nothing."""
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


_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: bytes that are printable stand for themselves, the rest follow from
    U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


_ALPHABET = _byte_level_alphabet()


class TextTokenizer:
    """A byte-level BPE, or a SentencePiece-style BPE with byte fallback, with its chat template.

    `before` and `after` are ids around an encoded text, where the raw tokenizer does not put them there itself.
    `always_before`: a chat whose template does not begin so gets them as well, as llama.cpp has it.
    """

    def __init__(
        self,
        raw: RawTokenizer,
        eos_ids: Sequence[int],
        chat_template: ChatTemplate | None = None,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
        always_before: bool = False,
    ) -> None:
        self._raw = raw
        raw.no_truncation()  # a tokenizer.json may carry the settings of a training: half a prompt, or one padded
        raw.no_padding()
        self.eos_ids = frozenset(eos_ids)
        self._before, self._after = list(before), list(after)
        self._chat_template = chat_template
        self._always_before = always_before
        self._added = raw.get_added_tokens_decoder()
        self._byte_fallback = raw.token_to_id("<0x0A>") is not None

    def encode(self, text: str) -> list[int]:
        return self._before + self._raw.encode(valid_text(text)).ids + self._after

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return b"" if added.special else added.content.encode()
        token = self._raw.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if not self._byte_fallback:
            known = all(character in _ALPHABET for character in token)  # a reserved token may be any text
            return bytes(_ALPHABET[character] for character in token) if known else token.encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()

    def special_text(self, token_id: int) -> str:
        added = self._added.get(token_id)
        return added.content if added is not None and added.special else ""

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
        if self._chat_template is None:
            raise ChatRefusal("this model has no chat template; use /v1/completions, or an instruct model")
        text = self._chat_template.render(messages, tools, documents, add_generation_prompt, **variables)
        ids: list[int] = self._raw.encode(valid_text(text), add_special_tokens=False).ids
        begun = not self._always_before or ids[: len(self._before)] == self._before
        return ids if begun else self._before + ids
