"""The tokenizer of a Hugging Face checkpoint: `tokenizer.json` with its chat templates and special tokens beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from workers.models.chat import ChatTemplate
from workers.models.config import ModelConfig, ModelError
from workers.models.hf_config import read_bounded, read_json
from workers.models.tokenizer import TextTokenizer

_MAX_TOKENIZER_BYTES = 64 << 20  # Gemma's has 33 MB
_SAMPLE = "Hello, world 1"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CLASS_DEFAULTS = {
    "Llama": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2": {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
}
"""Special tokens that transformers' tokenizer classes have where `tokenizer_config.json` does not name them."""


def hf_tokenizer(directory: Path, config: ModelConfig) -> TextTokenizer:
    """The tokenizer in `tokenizer.json` with the chat templates beside it, if there are some. Raises ModelError.

    An answer also ends at the tokenizer's own `eos_token`, as in vLLM.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{path} is missing; fetch the checkpoint again, with its tokenizer")
    try:
        raw = RawTokenizer.from_buffer(read_bounded(path, _MAX_TOKENIZER_BYTES))
    except Exception as error:  # the package raises a bare Exception
        raise ModelError(f"{path} is not a readable tokenizer ({error}); fetch it again") from error
    about = read_json(directory / "tokenizer_config.json") if (directory / "tokenizer_config.json").exists() else None
    if about and "added_tokens_decoder" in about:
        _add_tokens(raw, about["added_tokens_decoder"], directory / "tokenizer_config.json")
    templates, place = _templates(directory, about or {})
    special = _special_tokens(directory, about, raw, config)
    chat = ChatTemplate(templates, special, str(place)) if templates else None
    ends = (*config.eos_ids, raw.token_to_id(special["eos_token"]) if "eos_token" in special else None)
    tokenizer = TextTokenizer(raw, [id for id in ends if id is not None], chat)
    if tokenizer.decode(raw.encode(_SAMPLE).ids).strip() != _SAMPLE:
        raise ModelError(
            f"{path}: its kind of tokenizer is not supported, only byte-level BPE and SentencePiece's BPE with byte "
            "fallback; take another model"
        )
    return tokenizer


def _add_tokens(raw: RawTokenizer, added: Mapping[str, Any], place: Path) -> None:
    """Tokens that only `tokenizer_config.json` knows. Raises ModelError when they cannot have the ids it gives them."""
    known = raw.get_added_tokens_decoder()
    for number, about in sorted(added.items(), key=lambda item: int(item[0])):
        if int(number) in known and known[int(number)].content == about["content"]:
            continue
        flags = {
            key: about[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in about
        }
        raw.add_tokens([AddedToken(about["content"], **flags)])
        if raw.token_to_id(about["content"]) != int(number):
            raise ModelError(
                f"{place}: added token {about['content']!r} has id {number} there and "
                f"{raw.token_to_id(about['content'])} in tokenizer.json; fetch both files again"
            )


def _templates(directory: Path, about: Mapping[str, Any]) -> tuple[dict[str, str], Path]:
    """Chat templates by name and the file they come from: files of their own win over `tokenizer_config.json`."""
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    found = {name: path for name, path in files.items() if path.is_file()}
    if found:
        try:
            return {name: read_bounded(path).decode() for name, path in found.items()}, next(iter(found.values()))
        except (OSError, ValueError) as error:
            raise ModelError(f"{directory}: a chat template cannot be read ({error}); fetch it again") from error
    place, given = directory / "tokenizer_config.json", about.get("chat_template")
    legacy = directory / "chat_template.json"
    if given is None and legacy.is_file():
        place, given = legacy, read_json(legacy).get("chat_template")
    if isinstance(given, list):
        given = {one["name"]: one["template"] for one in given}
    elif isinstance(given, str):
        given = {"default": given}
    if given is None or (isinstance(given, dict) and all(isinstance(one, str) for one in given.values())):
        return given or {}, place
    raise ModelError(f"{place}: chat_template is neither a text nor texts by name; fetch the file again")


def _special_tokens(
    directory: Path, about: Mapping[str, Any] | None, raw: RawTokenizer, config: ModelConfig
) -> dict[str, str]:
    """Special tokens by the names that templates use, as transformers finds them.

    A checkpoint that says nothing about them leaves those whose ids are in `config.json`.
    """
    legacy = directory / "special_tokens_map.json"
    given = dict(about or {})
    if "added_tokens_decoder" not in given and legacy.is_file():
        given |= read_json(legacy)
    elif about is None:
        ids = {"bos_token": config.bos_id, "eos_token": next(iter(config.eos_ids), None)}
        return {name: raw.id_to_token(id) or "" for name, id in ids.items() if id is not None}
    kind = str(given.get("tokenizer_class") or "").removesuffix("Fast").removesuffix("Tokenizer")
    if kind != "Llama" or raw.token_to_id("<0x0A>") is not None:  # not of a Llama 3, which has no SentencePiece
        given = _CLASS_DEFAULTS.get(kind, {}) | given
    texts = {name: _text(given[name]) for name in _SPECIAL if given.get(name) is not None}
    return {name: text for name, text in texts.items() if text is not None}


def _text(token: Any) -> str | None:
    """A special token is written as its text or as an object with the text in it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
