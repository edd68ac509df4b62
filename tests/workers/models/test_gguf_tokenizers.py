"""What a GGUF file's vocabulary means: beginnings, ends, special tokens and templates, with llama.cpp's defaults."""

# ruff: noqa: RUF001 - DeepSeek writes its tokens so

import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from tests.workers.models.checkpoints import random_model, write_gguf
from workers.models import ChatRefusal, TemplateFault, Tokenizer
from workers.models.gguf_file import GgufFile
from workers.models.gguf_tokenizer import gguf_tokenizer, pre_tokenizer

PRE, BOS, EOS = "tokenizer.ggml.pre", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())[:200]


def vocabulary(*special: str, kind: int = 3) -> dict[str, Any]:
    """256 tokens, the last of them `special` ones: their ids are counted down from 255."""
    filler = [f"filler{number}" for number in range(56 - len(special))]
    tokens = [*ALPHABET, *filler, *reversed(special)]
    types = [1] * (256 - len(special)) + [kind] * len(special)
    return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}


def load(tmp_path: Path, keys: dict[str, Any], *special: str, kind: int = 3) -> Tokenizer:
    keys = vocabulary(*special, kind=kind) | {"tokenizer.ggml.merges": ["a b"]} | keys
    keys["tokenizer.ggml.tokens"][0] = "ab"
    return gguf_tokenizer(GgufFile(write_gguf(random_model("llama"), tmp_path / "m.gguf", keys=keys)))


@pytest.mark.parametrize(
    ("keys", "begins", "ends"),
    [
        ({PRE: "llama-bpe", BOS: 255, EOS: 254}, True, False),
        ({PRE: "llama3", BOS: 255, EOS: 254}, True, False),
        ({PRE: "llama-v3", BOS: 255, EOS: 254}, True, False),
        ({PRE: "llama-bpe", BOS: 255, "tokenizer.ggml.add_bos_token": False}, False, False),
        ({PRE: "gpt-2", BOS: 255, EOS: 254}, False, False),
        ({PRE: "qwen2", BOS: 255, EOS: 254}, False, False),
        ({PRE: "smollm", BOS: 255, EOS: 254}, False, False),
        ({PRE: None, BOS: 255, EOS: 254}, False, False),
        ({PRE: "qwen2", BOS: 255, EOS: 254, "tokenizer.ggml.add_bos_token": True}, True, False),
        ({PRE: "gpt-2", BOS: 255, EOS: 254, "tokenizer.ggml.add_eos_token": True}, False, True),
        ({PRE: "llama-bpe", BOS: 255, EOS: 254, "tokenizer.ggml.add_eos_token": True}, True, True),
    ],
)
def test_a_text_begins_and_ends_as_its_kind_of_vocabulary_says(
    keys: dict[str, Any], begins: bool, ends: bool, tmp_path: Path
) -> None:
    ids = load(tmp_path, keys, "<|begin|>", "<|stop|>").encode("ab")
    assert (ids[0] == 255, ids[-1] == 254, len(ids)) == (begins, ends, 1 + begins + ends)


@pytest.mark.parametrize(
    ("template", "count"), [("{{ bos_token }}{{ messages[0].content }}", 2), ("{{ messages[0].content }}", 2)]
)
def test_a_chat_begins_with_bos_once(template: str, count: int, tmp_path: Path) -> None:
    keys = {PRE: "llama-bpe", BOS: 255, EOS: 254, "tokenizer.chat_template": template}
    ids = load(tmp_path, keys, "<|begin|>", "<|stop|>").apply_chat_template([{"role": "user", "content": "ab"}])
    assert (ids[0], len(ids)) == (255, count)


@pytest.mark.parametrize(
    ("special", "keys", "expected"),
    [
        (["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|begin_of_text|>"], {}, {255, 254, 253}),
        (["<|im_end|>", "<|endoftext|>", "<|im_start|>"], {}, {255, 254}),
        (["<end_of_turn>", "<eos>", "<start_of_turn>", "<bos>"], {}, {255, 254}),
        (["<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"], {}, {255}),
        (["</s>", "<s>"], {}, {255}),
        (["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>"], {}, {255, 254, 253}),
        (["<one>", "<two>", "<three>"], {EOS: 255, "tokenizer.ggml.eot_token_id": 254}, {255, 254}),
        (["<one>", "<two>"], {"tokenizer.ggml.eom_token_id": 254, "tokenizer.ggml.fim_pad_token_id": 255}, {255, 254}),
        (["<|end|>", "<|return|>", "<|call|>"], {}, {254, 253}),
        (["<|end|>"], {}, {255}),
    ],
)
def test_tokens_end_an_answer_by_their_keys_and_by_their_names(
    special: list[str], keys: dict[str, Any], expected: set[int], tmp_path: Path
) -> None:
    for kind in (3, 1):  # a converter that forgot their type changes nothing
        tokenizer = load(tmp_path, {EOS: None} | keys, *special, kind=kind)
        assert tokenizer.eos_ids == expected
        named = [id for id in expected if special[255 - id] not in ("<one>", "<two>")]
        assert tokenizer.decode(named) == ""
        assert tokenizer.encode("".join(special[255 - id] for id in named)) == named


def test_types_of_tokens(tmp_path: Path) -> None:
    for kind, found, text in ((1, False, "<x>"), (2, True, ""), (3, True, ""), (4, True, "<x>"), (5, False, "<x>")):
        tokenizer = load(tmp_path, {EOS: None}, "<x>", kind=kind)
        assert (tokenizer.encode("<x>") == [255]) is found
        assert tokenizer.decode([255]) == text


def test_named_templates_and_broken_ones(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}]
    keys = {
        "tokenizer.chat_template": "a",
        "tokenizer.chat_template.tool_use": "aa",
        "tokenizer.chat_templates": ["tool_use"],
    }
    tokenizer = load(tmp_path, keys)
    assert [len(tokenizer.apply_chat_template(chat, tools=tools)) for tools in (None, [{}])] == [1, 2]
    with pytest.raises(ChatRefusal, match="has no chat template"):
        load(tmp_path, {}).apply_chat_template(chat)
    with pytest.raises(TemplateFault, match=r"m\.gguf: the chat template is broken"):
        load(tmp_path, {"tokenizer.chat_template": "{% if %}"})


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("it's 12345, $5.00!", ["it", "'", "s", " ", "123", "45", ",", " ", "$", "5", ".", "00", "!"]),
        ("a==b  c\n", ["a", "==", "b", " ", " c", "\n"]),
    ],
)
def test_a_file_that_names_no_pre_tokenizer_is_cut_as_in_llama_cpp(text: str, pieces: list[str]) -> None:
    found = [piece for piece, _ in pre_tokenizer("default", "m").steps.pre_tokenize_str(text)]
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece in found] == pieces


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("tekken", "deepseek-llm", "no-such"):
        with pytest.raises(Exception, match=rf'm\.gguf: pre-tokenizer "{re.escape(name)}" is not supported'):
            load(tmp_path, {PRE: name})
