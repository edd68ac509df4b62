"""Trained tokenizers (the `tokenizers` package) behind our own small interface."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from workers.models.chat import render_chat
from workers.models.config import ModelError
from workers.models.tokenizer import Detokenizer, valid_text

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

    `add_bos` puts `bos_id` before an encoded text where the raw tokenizer does not do so itself.
    """

    def __init__(
        self,
        raw: RawTokenizer,
        eos_ids: Sequence[int],
        bos_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        self._raw = raw
        self.eos_ids = frozenset(eos_ids)
        self._bos = [bos_id] if add_bos and bos_id is not None else []
        self._chat_template = chat_template
        self._added = raw.get_added_tokens_decoder()
        self._byte_fallback = raw.token_to_id("<0x0A>") is not None
        self._named: dict[str, str] = {}
        if bos_id is not None:
            self._named["bos_token"] = raw.id_to_token(bos_id) or ""
        if eos_ids:
            self._named["eos_token"] = raw.id_to_token(eos_ids[0]) or ""

    def encode(self, text: str) -> list[int]:
        return self._bos + self._raw.encode(valid_text(text)).ids

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
            return bytes(_ALPHABET[character] for character in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if self._chat_template is None:
            raise ModelError("this model has no chat template; use /v1/completions, or an instruct model")
        text = render_chat(self._chat_template, messages, self._named)
        return self._raw.encode(valid_text(text), add_special_tokens=False).ids
