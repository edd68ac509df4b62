"""Byte-level BPE tokenizers built from a vocabulary and merges, as GGUF files carry them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from workers.models.config import ModelError

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
"""What llama.cpp takes for a file that names no pre-tokenizer, one after the other."""


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before BPE runs.

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
