"""Checkpoints of every supported family, small and random, against transformers: Hugging Face and GGUF."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.workers.models.checkpoints import FAMILIES, IDS, random_model, save, write_gguf
from tests.workers.models.oracle import our_logits, their_logits
from workers.models import LoadedModel, ModelError, ModelSpec, load_model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_hugging_face_checkpoint_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    oracle = random_model(family)
    loaded = load_model(ModelSpec(str(save(oracle, tmp_path))))
    theirs = their_logits(oracle, IDS)
    assert theirs.std() > 0.5
    assert (our_logits(loaded, IDS) - theirs).abs().max() < 1e-4
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Grüße 1")) == "Grüße 1"
    assert loaded.tokenizer.eos_ids == {7}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_checkpoints_load_and_half_precision_runs(dtype: str, tmp_path: Path) -> None:
    oracle = random_model("qwen3").to(getattr(torch, dtype))
    path = str(save(oracle, tmp_path))
    exact = our_logits(load_model(ModelSpec(path)), IDS)
    oracle = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)  # .float() keeps a rounded rope table
    assert (exact - their_logits(oracle, IDS)).abs().max() < 1e-4
    half = load_model(ModelSpec(path, dtype=dtype))
    assert half.model.head.dtype == getattr(torch, dtype)
    assert torch.equal(half.model.head, oracle.lm_head.weight.t().to(getattr(torch, dtype)))
    error = (our_logits(half, IDS).float() - exact).abs().mean() / exact.abs().mean()
    assert error < {"bfloat16": 0.05, "float16": 0.01}[dtype]


def test_a_checkpoint_in_several_files_is_put_together(tmp_path: Path) -> None:
    oracle = random_model("llama")
    oracle.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    save(oracle, tmp_path / "whole")
    (tmp_path / "whole/tokenizer.json").rename(tmp_path / "tokenizer.json")
    loaded = load_model(ModelSpec(str(tmp_path)))
    assert (our_logits(loaded, IDS) - their_logits(oracle, IDS)).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "llama, tied", "mistral", "qwen2", "qwen3"])
def test_logits_of_a_gguf_file_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    oracle = random_model(family)
    loaded = load_model(ModelSpec(str(write_gguf(oracle, tmp_path / "model.gguf", "F32"))))
    assert (our_logits(loaded, IDS) - their_logits(oracle, IDS)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantised_weights_are_near_the_originals(kind: str, tmp_path: Path) -> None:
    oracle = random_model("llama")
    exact = load_model(ModelSpec(str(write_gguf(oracle, tmp_path / "exact.gguf", "F32"))))
    rough = load_model(ModelSpec(str(write_gguf(oracle, tmp_path / "rough.gguf", kind))))
    error = (rough.model.head - exact.model.head).abs().max() / exact.model.head.abs().max()
    assert error < {"F16": 1e-3, "BF16": 1e-2, "Q8_0": 1e-2, "Q4_0": 0.13, "Q4_1": 0.13}[kind]
    assert rough.fingerprint != exact.fingerprint


def loaded_llama(tmp_path: Path) -> LoadedModel:
    return load_model(ModelSpec(str(save(random_model("llama"), tmp_path))))


def test_the_fingerprint_follows_weights_and_dtype_and_not_the_place(tmp_path: Path) -> None:
    first, second = loaded_llama(tmp_path / "a"), loaded_llama(tmp_path / "b")
    assert first.fingerprint == second.fingerprint
    other = load_model(ModelSpec(str(tmp_path / "a"), dtype="bfloat16"))
    assert other.fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, 'model type "gpt2" is not supported'),
        ({"hidden_act": "gelu"}, "hidden_act = gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_hidden_layers": 4}, "model.layers.3.* is missing"),
        ({"intermediate_size": 95}, "should have shape"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, 'rope scaling "dynamic"'),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_a_configuration_we_cannot_compute_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(random_model("llama"), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    with pytest.raises(ModelError, match=message):
        load_model(ModelSpec(str(tmp_path)))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"topk_method": "magic"}, "topk_method = magic"), ({"moe_layer_freq": 2}, "moe_layer_freq = 2")],
)
def test_a_mixture_of_experts_of_another_kind_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(random_model("deepseek v3, experts"), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message) as error:
        load_model(ModelSpec(str(tmp_path)))
    assert "\n" not in str(error.value)


def test_a_model_larger_than_the_memory_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    save(random_model("deepseek v3, experts"), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"moe_intermediate_size": 10**9}))
    with pytest.raises(ModelError, match=r"its weights take 21\d{3}\.\d GB as float32, this machine has .* free"):
        load_model(ModelSpec(str(tmp_path)))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("file", "harm", "message"),
    [
        ("config.json", Path.unlink, "cannot be read"),
        ("config.json", cut, "not valid JSON"),
        ("model.safetensors", Path.unlink, "no .safetensors file"),
        ("model.safetensors", cut, "not a readable safetensors"),
        ("tokenizer.json", Path.unlink, "tokenizer.json is missing"),
        ("tokenizer.json", cut, "not a readable tokenizer"),
    ],
)
def test_a_broken_checkpoint_is_one_sentence(file: str, harm: Any, message: str, tmp_path: Path) -> None:
    save(random_model("llama"), tmp_path)
    harm(tmp_path / file)
    with pytest.raises(ModelError, match=message) as error:
        load_model(ModelSpec(str(tmp_path)))
    assert "\n" not in str(error.value)


def test_a_gguf_file_cut_anywhere_is_one_sentence(tmp_path: Path) -> None:
    whole = write_gguf(random_model("llama"), tmp_path / "whole.gguf", "F32").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 3000, 97), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf") as error:
            load_model(ModelSpec(str(path)))
        assert "\n" not in str(error.value)


def test_a_gguf_header_with_wrong_bytes_is_one_sentence_or_still_a_model(tmp_path: Path) -> None:
    whole = write_gguf(random_model("llama"), tmp_path / "whole.gguf", "F32").read_bytes()
    path = tmp_path / "damaged.gguf"
    chance = random.Random(1)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(6000)] = chance.choice([0, 1, 255, chance.randrange(256)])
        path.write_bytes(damaged)
        try:
            load_model(ModelSpec(str(path)))
        except ModelError:
            refused += 1
    assert refused > 100


def test_a_gguf_tokenizer_that_makes_no_sense_is_one_sentence(tmp_path: Path) -> None:
    path = write_gguf(random_model("llama"), tmp_path / "m.gguf", "F32", merges=["ab cd"])
    with pytest.raises(ModelError, match=r"m\.gguf: .*out of vocabulary"):
        load_model(ModelSpec(str(path)))


def test_a_file_that_is_no_gguf_and_a_name_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("hello, this is not a model at all")
    with pytest.raises(ModelError, match="does not begin with GGUF"):
        load_model(ModelSpec(str(tmp_path / "x.gguf")))
    with pytest.raises(ModelError, match='unknown model "nonsense"'):
        load_model(ModelSpec("nonsense"))
    with pytest.raises(ModelError, match='unknown dtype "int3"'):
        load_model(ModelSpec("tiny", dtype="int3"))
