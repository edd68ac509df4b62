"""Keys and tensors that change the arithmetic: honoured as transformers and llama.cpp do, or refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.workers.models.checkpoints import (
    FAMILIES,
    IDS,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    SHAPE,
    YARN_ROPE,
    random_model,
    save,
    write_gguf,
)
from tests.workers.models.oracle import our_logits, their_logits
from workers.models import ModelError, ModelSpec, load_model
from workers.models.hf_config import hf_config
from workers.models.rope import llama3_factors

GONE = object()


def edit(directory: Path, change: dict[str, Any], file: str = "config.json") -> None:
    path = directory / file
    config = (json.loads(path.read_text()) if path.exists() else {}) | change
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not GONE}))


def assert_same(directory: Path, oracle: PreTrainedModel | None = None) -> None:
    """Our logits are those of transformers, which reads the same directory unless given a model."""
    theirs = their_logits(oracle or AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(), IDS)
    assert (our_logits(load_model(ModelSpec(str(directory))), IDS) - theirs).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"rms_norm_eps": 0.05}),
        ("llama", {"rms_norm_eps": GONE, "rope_parameters": GONE, "head_dim": GONE}),
        ("llama, no grouping", {"num_key_value_heads": None, "hidden_act": "swish"}),
        ("llama", {"rope_parameters": GONE, "rope_theta": 500.0}),
        ("llama", {"rope_parameters": GONE, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3.0}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}, "rope_scaling": LINEAR_ROPE}),
        ("llama", {"rope_parameters": YARN_ROPE | {"factor": 3.0, "original_max_position_embeddings": 40}}),
        ("llama", {"rope_parameters": YARN_ROPE | {"attention_factor": 1.7, "truncate": False, "beta_fast": 9}}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.5}}),
        ("llama", {"rope_parameters": LLAMA3_ROPE | {"factor": 3.0, "original_max_position_embeddings": 20}}),
        ("llama", {"layer_types": ["full_attention"] * 3, "rope_scaling": {"type": "default", "factor": 1.0}}),
        ("mistral", {"rms_norm_eps": 0.02, "rope_parameters": LINEAR_ROPE}),
        ("qwen2", {"rms_norm_eps": 0.02, "attention_bias": False, "max_window_layers": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1, "layer_types": GONE}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 3, "layer_types": GONE}),
        ("qwen3", {"rms_norm_eps": 0.02, "layer_types": ["full_attention"] * 3}),
        ("deepseek v2, experts", {"rms_norm_eps": 0.02, "num_key_value_heads": None, "head_dim": 3}),
        ("deepseek v2, experts", {"routed_scaling_factor": GONE, "norm_topk_prob": GONE, "topk_method": GONE}),
        ("deepseek v3, experts", {"rms_norm_eps": 0.02, "routed_scaling_factor": GONE, "norm_topk_prob": GONE}),
        ("deepseek v3", {"rope_interleave": GONE}),
        ("deepseek v2", {"rope_interleave": False}),
    ],
)
def test_a_key_is_honoured_and_one_left_out_has_the_default_of_transformers(
    family: str, change: dict[str, Any], tmp_path: Path
) -> None:
    save(random_model(family), tmp_path)
    edit(tmp_path, change)
    assert_same(tmp_path)


def test_mistrals_window_and_heads_have_its_own_defaults(tmp_path: Path) -> None:
    save(random_model("mistral", num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=9000), tmp_path)
    edit(tmp_path, {"num_key_value_heads": GONE, "sliding_window": GONE})
    assert_same(tmp_path)
    assert load_model(ModelSpec(str(tmp_path))).config.context_length == 4096
    edit(tmp_path, {"sliding_window": 40})
    assert load_model(ModelSpec(str(tmp_path))).config.context_length == 40


@pytest.mark.parametrize("same", [True, False])
def test_a_head_beside_a_tied_embedding_counts_where_it_differs(same: bool, tmp_path: Path) -> None:
    oracle = random_model("llama")
    if same:
        with torch.no_grad():
            oracle.lm_head.weight.copy_(oracle.model.embed_tokens.weight)
    save(oracle, tmp_path)
    edit(tmp_path, {"tie_word_embeddings": True})
    assert_same(tmp_path)
    assert load_model(ModelSpec(str(tmp_path))).config.tied is same


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act = gelu"),
    ("llama", {"mlp_bias": True}, "mlp_bias = True"),
    ("llama", {"attention_bias": True}, "attention_bias = True"),
    ("qwen3", {"attention_bias": True}, "attention_bias = True"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("llama", {"rope_parameters": LINEAR_ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, '"dynamic" is not supported'),
    ("llama", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, '"longrope" is not supported'),
    ("llama", {"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
    ("llama", {"rope_parameters": LINEAR_ROPE | {"high_freq_factor": 4.0}}, "high_freq_factor = 4.0"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "lacks 'factor'"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta = 0"),
    ("llama", {"rope_parameters": LINEAR_ROPE | {"factor": -1}}, "factor of -1"),
    ("llama", {"rope_parameters": {"full_attention": LINEAR_ROPE}}, "full_attention"),
    ("llama", {"original_max_position_embeddings": 64}, "original_max_position_embeddings = 64"),
    ("llama", {"sliding_window": 64}, "sliding_window = 64"),
    ("llama", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window is false"),
    ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types has linear_attention"),
    ("llama", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
    ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("llama", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
    ("llama", {"attention_multiplier": 0.1}, "attention_multiplier"),
    ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier"),
    ("llama", {"residual_multiplier": 0.2}, "residual_multiplier"),
    ("llama", {"logits_scaling": 8.0}, "logits_scaling"),
    ("llama", {"logit_scale": 0.06}, "logit_scale"),
    ("llama", {"scale_emb": 12}, "scale_emb"),
    ("llama", {"scale_depth": 1.4}, "scale_depth"),
    ("llama", {"dim_model_base": 256}, "dim_model_base"),
    ("llama", {"layer_norm_eps": 1e-5}, "layer_norm_eps"),
    ("llama", {"parallel_residual": True}, "parallel_residual"),
    ("llama", {"use_qk_norm": True}, "use_qk_norm"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved"),
    ("llama", {"num_local_experts": 8}, "num_local_experts"),
    ("llama", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers"),
    ("llama", {"per_layer_config": {"1": {"num_key_value_heads": 1}}}, "per_layer_config"),
    ("llama", {"never_heard_of": 3}, "never_heard_of = 3"),
    ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder"),
    ("llama", {"is_causal": False}, "is_causal = False"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ("llama", {"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config .fp8.: quantised weights"),
    ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
    ("llama", {"quantization_config": {"quant_method": "awq"}}, "awq"),
    ("llama", {"quantization": {"group_size": 64, "bits": 4}}, "quantization = "),
    ("llama", {"eos_token_id": "</s>"}, "eos_token_id = </s>"),
    ("llama", {"num_hidden_layers": 0}, "layers = 0 is no positive number"),
    ("llama", {"max_position_embeddings": 512.5}, "contradicts itself|no positive number|not a"),
    ("llama", {"rms_norm_eps": None}, "contradicts itself|epsilon"),
    ("deepseek v2, experts", {"scoring_func": "sigmoid"}, "scoring_func = sigmoid"),
    ("deepseek v3, experts", {"scoring_func": "softmax"}, "scoring_func = softmax"),
    ("deepseek v3, experts", {"topk_method": "greedy"}, "topk_method = greedy"),
    ("deepseek v2, experts", {"norm_topk_prob": True}, "norm_topk_prob = True"),
    ("deepseek v3, experts", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
    ("deepseek v3", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
    ("deepseek v2", {"attention_bias": True}, "attention_bias = True"),
    ("deepseek v3", {"index_topk": 2048}, "index_topk = 2048"),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_a_key_that_we_do_not_compute_is_refused_by_name(
    family: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, _, options = FAMILIES[family]
    config(**{"architectures": [config.__name__.replace("Config", "ForCausalLM")]} | SHAPE | options).save_pretrained(
        tmp_path
    )
    edit(tmp_path, change)
    with pytest.raises(ModelError, match=message) as error:
        load_model(ModelSpec(str(tmp_path)))
    assert "config.json" in str(error.value) or "model " in str(error.value) or str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


# As their authors published them, but for sizes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM2": {
        **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1},
        **{"eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664},
        **{"intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False},
        **{"model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3},
        **{"pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False},
        **{"rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "transformers_version": "4.42.3"},
        **{"use_cache": True, "vocab_size": 49152},
    },
    "Llama 3.2": {
        **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
        **{"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu"},
        **{"hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "mlp_bias": False},
        **{"max_position_embeddings": 131072, "model_type": "llama", "num_attention_heads": 32},
        **{"num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05},
        "rope_scaling": {
            **{"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
            **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
        },
        **{"rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True},
        **{"transformers_version": "4.45.0.dev0", "vocab_size": 128256, "_name_or_path": "x", "unsloth_fixed": True},
    },
    "Qwen2.5": {
        **{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643},
        **{"eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02},
        **{"intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21},
        **{"model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2},
        **{"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True},
        **{"torch_dtype": "bfloat16", "transformers_version": "4.43.1", "use_cache": True, "use_mrope": False},
        **{"use_sliding_window": False, "vocab_size": 151936},
    },
    "Qwen3": {
        **{"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
        **{"bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024},
        **{"initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960},
        **{"max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28},
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000},
        **{"sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True},
        **{"transformers_version": "4.51.0", "use_sliding_window": False, "vocab_size": 151936},
    },
    "Mistral": {
        **{"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2},
        **{"hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336},
        **{"max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32},
        **{"num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0},
        **{"sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True},
        **{"transformers_version": "4.42.0.dev0", "vocab_size": 32768},
    },
    "DeepSeek V2": {
        **{"architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0},
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
        **{"aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1},
        **{"hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944},
        **{"kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2"},
        **{"moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64},
        **{"n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6},
        **{"num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": None},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06},
        "rope_scaling": {
            **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
            **{"original_max_position_embeddings": 4096, "type": "yarn"},
        },
        **{"rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True},
        **{"tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16"},
        **{"transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 102400},
    },
}
PUBLISHED["DeepSeek V3, converted to bfloat16"] = PUBLISHED["DeepSeek V2"] | {
    **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "scoring_func": "sigmoid"},
    **{"ep_size": 1, "num_nextn_predict_layers": 1, "topk_method": "noaux_tc", "norm_topk_prob": True},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_as_their_authors_published_them_are_taken(name: str, tmp_path: Path) -> None:
    config = hf_config(tmp_path, PUBLISHED[name])
    assert config.layers == PUBLISHED[name]["num_hidden_layers"]


@pytest.mark.parametrize("family", FAMILIES)
def test_configurations_that_transformers_saves_are_taken(family: str, tmp_path: Path) -> None:
    config, _, options = FAMILIES[family]
    config(**SHAPE | options).save_pretrained(tmp_path)
    hf_config(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    hf_config(tmp_path, json.loads(config(**SHAPE | options).to_json_string(use_diff=False)))


# GGUF

LINEAR = {".rope.scale_linear": 4.0}


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama, linear rope", LINEAR),
        ("llama, linear rope", {".rope.scaling.factor": 4.0}),
        (
            "llama, linear rope",
            {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0, ".rope.scale_linear": 9.0},
        ),
        ("llama, linear rope", LINEAR | {".rope.scaling.factor": 0.0, ".rope.scaling.finetuned": True}),
        ("llama", {".rope.scaling.type": "none", ".rope.scaling.factor": 4.0}),
        ("llama", {".rope.scale_linear": 1.0, ".rope.dimension_count": 16, ".attention.value_length": 16}),
        ("llama", {".expert_count": 0, ".attention.causal": True, ".tensor_data_layout": "Meta AI original pth"}),
        ("llama", {".vocab_size": 256, ".attention.key_length": None, ".rope.freq_base": None}),
        ("llama", {".attention.head_count_kv": [2, 2, 2], ".feed_forward_length": [96, 96, 96]}),
        ("llama, no grouping", {".attention.head_count_kv": None}),
        (
            "qwen3, yarn",
            {".rope.scaling.type": "yarn", ".rope.scaling.factor": 8.0, ".rope.scaling.original_context_length": 64},
        ),
        ("qwen2", {"general.type": "model", "general.name": "x", "quantize.imatrix.file": "y"}),
    ],
)
def test_a_gguf_key_is_honoured_as_in_llama_cpp(family: str, keys: dict[str, Any], tmp_path: Path) -> None:
    oracle = random_model(family)
    loaded = load_model(ModelSpec(str(write_gguf(oracle, tmp_path / "m.gguf", keys=keys))))
    assert (our_logits(loaded, IDS) - their_logits(oracle, IDS)).abs().max() < 1e-4


def test_frequency_factors_of_a_gguf_file_multiply_with_a_linear_scale(tmp_path: Path) -> None:
    factors = np.array(llama3_factors(16, 500.0, 8.0, 1.0, 4.0, 64), np.float32)
    oracle = random_model("llama 3 rope")
    plain = write_gguf(oracle, tmp_path / "plain.gguf", tensors={"rope_freqs.weight": factors})
    assert (our_logits(load_model(ModelSpec(str(plain))), IDS) - their_logits(oracle, IDS)).abs().max() < 1e-4
    scaled = write_gguf(oracle, tmp_path / "scaled.gguf", keys=LINEAR, tensors={"rope_freqs.weight": factors})
    oracle.model.rotary_emb.inv_freq /= 4.0
    assert (our_logits(load_model(ModelSpec(str(scaled))), IDS) - their_logits(oracle, IDS)).abs().max() < 1e-4


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


GGUF_REFUSED: list[tuple[dict[str, Any], dict[str, np.ndarray], str]] = [
    ({".rope.dimension_count": 8}, {}, "llama.rope.dimension_count = 8"),
    ({".attention.value_length": 32}, {}, "llama.attention.value_length = 32"),
    ({".rope.dimension_sections": [4, 4, 0, 0]}, {}, "llama.rope.dimension_sections"),
    ({".rope.scaling.type": "longrope"}, {}, '"longrope" is not supported'),
    ({".rope.scaling.factor": -2.0}, {}, "makes no frequencies"),
    ({".rope.scaling.yarn_log_multiplier": 0.1}, {}, "yarn_log_multiplier"),
    ({".expert_count": 8}, {}, "llama.expert_count = 8"),
    ({".attention.clamp_kqv": 8.0}, {}, "llama.attention.clamp_kqv = 8.0"),
    ({".attention.scale": 0.1}, {}, "llama.attention.scale"),
    ({".attention.causal": False}, {}, "llama.attention.causal = False"),
    ({".attention.sliding_window_pattern": 6}, {}, "sliding_window_pattern"),
    ({".attn_logit_softcapping": 50.0}, {}, "attn_logit_softcapping"),
    ({".final_logit_softcapping": 30.0}, {}, "final_logit_softcapping"),
    ({".logit_scale": 0.06}, {}, "llama.logit_scale"),
    ({".residual_scale": 0.2}, {}, "llama.residual_scale"),
    ({".embedding_scale": 12.0}, {}, "llama.embedding_scale"),
    ({".use_parallel_residual": True}, {}, "use_parallel_residual"),
    ({".nextn_predict_layers": 1}, {}, "nextn_predict_layers"),
    ({".never_heard_of": 1}, {}, "llama.never_heard_of = 1"),
    ({".attention.head_count_kv": [2, 1, 2]}, {}, "attention.head_count_kv differs between layers"),
    ({".vocab_size": 300}, {}, "llama.vocab_size = 300, but it has 256 tokens"),
    ({".attention.layer_norm_rms_epsilon": None}, {}, "layer_norm_rms_epsilon is missing"),
    ({"general.type": "adapter"}, {}, 'general.type "adapter"'),
    ({"general.alignment": 33}, {}, "general.alignment 33"),
    ({"tokenizer.ggml.pre": "poro-chat"}, {}, 'pre-tokenizer "poro-chat" is not supported'),
    ({"tokenizer.ggml.model": "llama"}, {}, 'tokenizer "llama" is not supported'),
    ({"tokenizer.ggml.add_space_prefix": True}, {}, "tokenizer.ggml.add_space_prefix = True"),
    ({"tokenizer.ggml.remove_extra_whitespaces": True}, {}, "remove_extra_whitespaces"),
    ({"tokenizer.ggml.add_sep_token": True}, {}, "add_sep_token"),
    ({"tokenizer.ggml.suppress_tokens": [1]}, {}, "tokenizer.ggml.suppress_tokens"),
    ({"tokenizer.ggml.precompiled_charsmap": [1]}, {}, "precompiled_charsmap"),
    ({"tokenizer.ggml.normalizer.lowercase": True}, {}, "normalizer.lowercase"),
    ({"tokenizer.ggml.add_bos_token": True}, {}, "bos_token_id is missing"),
    ({"tokenizer.ggml.eos_token_id": 999}, {}, "eos_token_id = 999 is none of the 256 tokens"),
    ({"tokenizer.ggml.token_type": [1, 1]}, {}, "256 tokens and 2 types"),
    ({"tokenizer.ggml.tokens": ["a"] * 256}, {}, "no list of different texts"),
    ({}, {"blk.0.attn_output.bias": ones(64)}, "tensor blk.0.attn_output.bias has no place"),
    ({}, {"blk.0.attn_sinks.weight": ones(4)}, "tensor blk.0.attn_sinks.weight has no place"),
    ({}, {"blk.3.attn_norm.weight": ones(64)}, "tensor blk.3.attn_norm.weight has no place"),
    ({}, {"blk.0.attn_norm.bias": ones(64)}, "tensor blk.0.attn_norm.bias has no place"),
    ({}, {"blk.1.attn_q.bias": ones(64)}, "tensor blk.1.attn_q.bias has no place"),
    ({}, {"output_norm.bias": ones(64)}, "tensor output_norm.bias has no place"),
    ({}, {"rope_freqs.weight": ones(3)}, "makes no frequencies|contradicts itself"),
    ({}, {"blk.0.attn_q.bias": ones(64)}, "attn_k.bias is missing"),
    (
        {},
        {f"blk.{n}.attn_{x}_norm.weight": ones(16) for n in range(3) for x in "qk"},
        "attn_k_norm.weight has no place",
    ),
]


@pytest.mark.parametrize(("keys", "tensors", "message"), GGUF_REFUSED, ids=[message for *_, message in GGUF_REFUSED])
def test_a_gguf_key_or_tensor_that_we_do_not_compute_is_refused_by_name(
    keys: dict[str, Any], tensors: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    path = write_gguf(random_model("llama"), tmp_path / "m.gguf", keys=keys, tensors=tensors)
    with pytest.raises(ModelError, match=message) as error:
        load_model(ModelSpec(str(path)))
    assert "m.gguf" in str(error.value)
    assert "\n" not in str(error.value)
