"""The tokenizer in a GGUF file: byte-level BPE ("gpt2") only, with the pre-tokenizers, defaults and end tokens of
llama.cpp.

Every `tokenizer.*` key is honoured, neutral or refused by name; the table in docs/engine.md says which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from workers.models.chat import ChatTemplate
from workers.models.config import ModelError
from workers.models.gguf_file import GgufFile
from workers.models.tokenizer import TextTokenizer

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
"""The patterns that llama.cpp takes for a file that names no pre-tokenizer, one after the other."""


@dataclass(frozen=True)
class PreTokenizer:
    """The cutting of text before BPE runs.

    `whole_words` takes a piece that is in the vocabulary as it is; `adds_bos`: such vocabularies begin a text with
    their BOS token unless the file says otherwise.
    """

    steps: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    whole_words: bool = False
    adds_bos: bool = False


def pre_tokenizer(name: str, source: str) -> PreTokenizer:
    """The pre-tokenizer that llama.cpp calls `name` (tokenizer.ggml.pre). Raises ModelError if unknown."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return PreTokenizer(gpt2)
    if name == "default":
        return PreTokenizer(_split(*_DEFAULT))
    if name == "smollm":
        return PreTokenizer(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]))
    if name in ("llama-bpe", "llama3", "llama-v3"):
        return PreTokenizer(_split(_WORDS.replace("DIGITS", "{1,3}")), whole_words=True, adds_bos=True)
    if name in ("qwen2", "deepseek-r1-qwen"):
        return PreTokenizer(_split(_WORDS.replace("DIGITS", "")), normalizers.NFC())
    raise ModelError(
        f'{source}: pre-tokenizer "{name}" is not supported in GGUF; use the Hugging Face directory of the model'
    )


def bpe_tokenizer(
    tokens: Sequence[str], merges: Sequence[str], added: Mapping[str, bool], pre: PreTokenizer, source: str
) -> Tokenizer:
    """A tokenizer over `tokens` (index = id) and `merges` ("left right").

    `added` tokens are found in the text before anything else; those mapped to True are special (control)
    tokens.
    """
    vocab = {token: id for id, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.whole_words))
    except Exception as error:  # the package raises a bare Exception
        raise ModelError(f"{source}: its tokenizer is broken ({error}); fetch the file again") from error
    if pre.normalizer is not None:
        tokenizer.normalizer = pre.normalizer
    tokenizer.pre_tokenizer = pre.steps
    tokenizer.decoder = decoders.ByteLevel()
    for special in (True, False):
        chosen = [AddedToken(t, special=special, normalized=False) for t, kind in added.items() if kind is special]
        tokenizer.add_special_tokens(chosen) if special else tokenizer.add_tokens(chosen)
    return tokenizer


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


HONOURED = (
    *("model", "pre", "tokens", "token_type", "merges", "add_bos_token", "add_eos_token"),
    *(
        f"{name}_token_id"
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding", "fim_pad", "fim_rep", "fim_sep")
    ),
)
NEUTRAL = (
    *(f"{name}_token_id" for name in ("seperator", "mask", "cls", "fim_pre", "fim_suf", "fim_mid")),
    *("prefix_token_id", "suffix_token_id", "middle_token_id", "scores", "token_type_count"),
)
"""Used by none of: BPE, chats, completions."""
ONLY_FALSE = ("add_space_prefix", "add_sep_token", "remove_extra_whitespaces", "escape_whitespaces")
"""Keys of other kinds of tokenizers than ours."""

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),  # noqa: RUF001
)
"""Tokens that end an answer by their text alone, as in llama.cpp's `llama-vocab.cpp`."""
_FIM_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""So do these, one of each kind: a file's own key, or else the first in the vocabulary."""


def gguf_end_ids(file: GgufFile) -> tuple[int, ...]:
    """Ids that end an answer: eos first, then those with keys of their own, then those known by their text."""
    tokens = {token: id for id, token in enumerate(_tokens(file))}
    found = [_id(file, name) for name in ("eos", "eot", "eom")]
    found += [tokens.get(text) for text in _ENDS if not _not_an_end(text, tokens)]
    for name, texts in _FIM_ENDS.items():
        found.append(_id(file, name) or next((tokens[text] for text in texts if text in tokens), None))
    return tuple(dict.fromkeys(id for id in found if id is not None))


def gguf_bos_id(file: GgufFile) -> int | None:
    """The id of the token that texts begin with, where the file names one."""
    return _id(file, "bos")


def gguf_tokenizer(file: GgufFile) -> TextTokenizer:
    """The tokenizer and chat templates in a file's metadata. Raises ModelError for what it does not support."""
    source, about = str(file.path), file.metadata
    if (kind := about.get("tokenizer.ggml.model")) != "gpt2":
        raise ModelError(
            f'{source}: tokenizer "{kind}" is not supported in GGUF; use the Hugging Face directory of the model'
        )
    _check_keys(file)
    tokens, ends = _tokens(file), gguf_end_ids(file)
    kinds = about.get("tokenizer.ggml.token_type")
    if kinds is not None and (not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens)):
        raise ModelError(f"{source}: it has {len(tokens)} tokens and {np.size(kinds)} types of them; fetch it again")
    added = {
        token: kind in (_CONTROL, _UNKNOWN) or id in ends
        for id, (token, kind) in enumerate(
            zip(tokens, [1] * len(tokens) if kinds is None else kinds.tolist(), strict=True)
        )
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) or id in ends
    }
    pre = pre_tokenizer(about.get("tokenizer.ggml.pre") or "default", source)
    raw = bpe_tokenizer(tokens, about.get("tokenizer.ggml.merges", []), added, pre, source)
    named = {name: _id(file, key) for name, key in _NAMES.items()}
    templates = _templates(file)
    special = {name: tokens[id] for name, id in named.items() if id is not None}
    return TextTokenizer(
        raw,
        ends,
        ChatTemplate(templates, special, source) if templates else None,
        before=_around(file, "bos", pre.adds_bos),
        after=_around(file, "eos", False),
        always_before=True,
    )


_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _tokens(file: GgufFile) -> list[str]:
    given = file.metadata.get("tokenizer.ggml.tokens", [])
    tokens = [text or f"[EMPTY_{id}]" for id, text in enumerate(given)]
    if not isinstance(given, list) or len(set(tokens)) != len(tokens):
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens is no list of different texts; fetch it again")
    return tokens


def _id(file: GgufFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    found = file.metadata.get(key)
    count = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    if found is not None and not (type(found) is int and 0 <= found < count):
        raise ModelError(f"{file.path}: {key} = {found} is none of the {count} tokens; fetch it again")
    return found


def _around(file: GgufFile, name: str, default: bool) -> list[int]:
    """The token that a text begins ("bos") or ends ("eos") with, if the file or its kind of vocabulary says so."""
    key = f"tokenizer.ggml.add_{name}_token"
    if not file.metadata.get(key, default):
        return []
    id = _id(file, name)
    if id is None:
        raise ModelError(f"{file.path}: {key} is on, and tokenizer.ggml.{name}_token_id is missing; fetch it again")
    return [id]


def _not_an_end(text: str, tokens: dict[str, int]) -> bool:
    """Vocabularies in which a text of the list means something else."""
    if text == "<|end|>":
        return ("<|call|>" in tokens and "<|return|>" in tokens) or ("<|calls|>" in tokens and "<|flush|>" in tokens)
    return text == "</s>" and "<|tool_response>" in tokens


def _templates(file: GgufFile) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {key: text for key, text in file.metadata.items() if key == prefix or key.startswith(prefix + ".")}
    templates = {key.removeprefix(prefix).removeprefix(".") or "default": text for key, text in found.items()}
    if not all(isinstance(text, str) for text in templates.values()):
        raise ModelError(f"{file.path}: {prefix} is no text; fetch it again")
    return templates


def _check_keys(file: GgufFile) -> None:
    for key, value in file.metadata.items():
        name = key.removeprefix("tokenizer.ggml.")
        if name == key:
            if key.startswith("tokenizer.") and not key.startswith(
                ("tokenizer.chat_template", "tokenizer.huggingface.")
            ):
                raise _refused(file, key, value)
        elif not (name in HONOURED or name in NEUTRAL or (name in ONLY_FALSE and not value)):
            raise _refused(file, key, value)


def _refused(file: GgufFile, key: str, value: Any) -> ModelError:
    shown = "" if hasattr(value, "__len__") else f" = {value}"
    return ModelError(
        f"{file.path}: {key}{shown} is not supported, and may change the answers; "
        "use the Hugging Face directory of the model"
    )
