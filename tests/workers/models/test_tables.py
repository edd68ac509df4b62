"""The tables of docs/engine.md say exactly what the code does with keys of checkpoints."""

import re
from pathlib import Path

import pytest

from workers.models import generation_config, gguf_checkpoint, gguf_tokenizer, hf_config, rope
from workers.models.config import ModelError

DOCS = Path(__file__).parents[3] / "docs/engine.md"


def rows() -> dict[str, list[set[str]]]:
    """By its first cell, what a row's second cell has in backquotes."""
    found: dict[str, list[set[str]]] = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 2:
            found.setdefault(cells[0], []).append(set(re.findall(r"`([^`]+)`", cells[1])))
    return found


def test_the_tables_are_what_the_code_has() -> None:
    table = rows()
    deepseek = set(hf_config.HONOURED_BY["deepseek_v2"])
    assert table["honoured"] == [set(hf_config.HONOURED)]
    assert table["honoured for mistral"] == [set(hf_config.HONOURED_BY["mistral"])]
    assert table["honoured for qwen2, qwen3"] == [set(hf_config.HONOURED_BY[name]) for name in ("qwen2",)]
    assert hf_config.HONOURED_BY["qwen2"] == hf_config.HONOURED_BY["qwen3"]
    assert table["honoured for deepseek_v2, deepseek_v3"] == [deepseek]
    assert table["honoured for deepseek_v3"] == [set(hf_config.HONOURED_BY["deepseek_v3"]) - deepseek]
    assert table["one value only"] == [set(hf_config.ONLY), set(gguf_checkpoint.ONLY)]
    assert table["neutral, as patterns"] == [set(hf_config.NEUTRAL)]
    assert table["default of requests"] == [set(generation_config.TAKEN)]
    assert table["no matter, as patterns"] == [set(generation_config.NEUTRAL)]
    for kind, keys in rope.ROPE_KEYS.items():
        assert table[f"`{kind}`"] == [set(keys)]
    assert table["honoured, of the architecture"] == [set(gguf_checkpoint.HONOURED)]
    assert table["neutral, of the architecture"] == [set(gguf_checkpoint.NEUTRAL)]
    assert table["honoured, `tokenizer.ggml.`"] == [set(gguf_tokenizer.HONOURED)]
    assert table["false only, `tokenizer.ggml.`"] == [set(gguf_tokenizer.ONLY_FALSE)]
    assert table["neutral, `tokenizer.ggml.`"] == [set(gguf_tokenizer.NEUTRAL)]


LLAMA = {
    **{"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "max_position_embeddings": 512},
}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_a_table_honours_for_one_family_is_refused_for_another(family: str, tmp_path: Path) -> None:
    mine = {*hf_config.HONOURED, *hf_config.HONOURED_BY.get(family, ())}
    for key in {key for keys in hf_config.HONOURED_BY.values() for key in keys} - mine:
        with pytest.raises(ModelError, match=rf"config\.json: {key} = 3 is not supported for {family}"):
            hf_config.hf_config(tmp_path, LLAMA | {"model_type": family, key: 3})
    for pattern in hf_config.NEUTRAL:
        key = re.sub(r"\((\w+)\|[^)]*\)\??|\[(\w)\w*\]", r"\1\2", pattern).replace(".*", "x").replace("\\", "")
        assert re.fullmatch(pattern, key)
        hf_config.hf_config(tmp_path, LLAMA | {"num_key_value_heads": 4, "model_type": family, key: 3})
