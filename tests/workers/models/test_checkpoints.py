"""Checkpoints of every supported family, small and random, against transformers: Hugging Face and GGUF."""

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.workers.models.oracle import our_logits, their_logits
from workers.models import LoadedModel, ModelError, ModelSpec, load_model

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "eos_token_id": 7,
    "bos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
DEEPSEEK_YARN = YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.0}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "first_k_dense_replace": 3,  # all layers
}
EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": False,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama, tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama, one KV head": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 1}),
    "llama, no grouping": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4}),
    "llama, wide heads": (LlamaConfig, LlamaForCausalLM, {"head_dim": 32}),
    "llama 3 rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR_ROPE}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "qwen3, yarn": (Qwen3Config, Qwen3ForCausalLM, {"rope_parameters": YARN_ROPE}),
    "deepseek v2": (DeepseekV2Config, DeepseekV2ForCausalLM, LATENT),
    "deepseek v2, yarn": (DeepseekV2Config, DeepseekV2ForCausalLM, LATENT | {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek v2, plain queries": (DeepseekV2Config, DeepseekV2ForCausalLM, LATENT | {"q_lora_rank": None}),
    "deepseek v3": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT),
    "deepseek v3, yarn": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT | {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek v3, halves": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT | {"rope_interleave": False}),
    "deepseek v2, experts": (DeepseekV2Config, DeepseekV2ForCausalLM, LATENT | EXPERTS),
    "deepseek v2, experts in groups": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        LATENT | EXPERTS | {"topk_method": "group_limited_greedy"},
    ),
    "deepseek v3, experts": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT | EXPERTS | {"norm_topk_prob": True}),
    "deepseek v3, experts, raw shares": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENT | EXPERTS),
    "deepseek v3, halves, plain queries": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        LATENT | {"rope_interleave": False, "q_lora_rank": None},
    ),
}

IDS = np.random.default_rng(0).integers(0, 256, 100).tolist()


def random_model(family: str) -> PreTrainedModel:
    config, model, options = FAMILIES[family]
    torch.manual_seed(0)
    oracle: PreTrainedModel = model(config(**SHAPE | options)).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():  # norms and biases start as ones and zeros
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, buffer in oracle.named_buffers():  # the bias of a router's choice is none of the parameters
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    return oracle


def save(oracle: PreTrainedModel, directory: Path) -> Path:
    oracle.save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(tokenizer_models.BPE({character: id for id, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


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


def write_gguf(oracle: PreTrainedModel, path: Path, kind: str, merges: list[str] | None = None) -> Path:
    """What llama.cpp's converter would write: its names, and for the llama architecture its row order."""
    config = oracle.config
    state = {name: tensor.numpy() for name, tensor in oracle.state_dict().items()}
    arch = config.model_type if config.model_type != "mistral" else "llama"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if "qwen" in arch else "gpt-2")
    writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet())[:255], "ab"])
    writer.add_token_types([1] * 256)
    writer.add_token_merges(merges or ["a b"])
    writer.add_eos_token_id(7)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    quantised = gguf.GGMLQuantizationType[kind]
    for name, tensor in state.items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = tensor.reshape(-1, 2, head_dim // 2, tensor.shape[-1]).swapaxes(1, 2).reshape(tensor.shape)
        if tensor.ndim == 2 and kind != "F32":
            writer.add_tensor(target, gguf.quants.quantize(tensor, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(target, tensor.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
