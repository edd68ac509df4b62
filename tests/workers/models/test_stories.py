"""A trained 260 K-parameter Llama (karpathy/tinyllamas, MIT): real weights in Meta's own row order."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.conftest import SHARED
from tests.workers.engine.test_zeroed_block import blocks_without_effect
from tests.workers.models.oracle import llama_shape, our_logits, their_logits
from workers.engine import Sampling, generate
from workers.models import LoadedModel, ModelConfig, ModelSpec
from workers.models.assemble import Names, assemble
from workers.models.decoder import Decoder
from workers.models.tokenizer import ByteTokenizer
from workers.models.weights import check_shapes

FILE = SHARED / "models/stories260K.bin"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason=f"{FILE} is not beside this checkout")

BOS = 1


def read_checkpoint(path: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """llama2.c's format: seven int32, then each kind of tensor for all layers, float32."""
    data = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, context = struct.unpack_from("7i", data)
    config = ModelConfig(
        "stories260K", layers, dim, hidden, heads, kv_heads, dim // heads, vocab, context, eos_ids=(BOS,)
    )
    values = np.frombuffer(data, np.float32, offset=28)
    kv = config.head_dim * kv_heads
    tensors = {"embed.weight": values[: vocab * dim].reshape(vocab, dim)}
    offset = vocab * dim
    for name, shape in (
        ("attn_norm", (dim,)), ("q", (dim, dim)), ("k", (kv, dim)), ("v", (kv, dim)), ("out", (dim, dim)),
        ("ffn_norm", (dim,)), ("gate", (hidden, dim)), ("down", (dim, hidden)), ("up", (hidden, dim)),
    ):  # fmt: skip
        for layer in range(layers):
            size = int(np.prod(shape))
            tensors[f"{layer}.{name}.weight"] = values[offset : offset + size].reshape(shape)
            offset += size
    tensors["norm.weight"] = values[offset : offset + dim]
    return config, tensors


def words() -> list[bytes]:
    """Pieces of the vocabulary."""
    data = (SHARED / "models/tok512.bin").read_bytes()
    offset, pieces = 4, []
    while offset < len(data):
        (length,) = struct.unpack_from("i", data, offset + 4)
        pieces.append(data[offset + 8 : offset + 8 + length])
        offset += 8 + length
    return pieces


@pytest.fixture(scope="module")
def stories() -> LoadedModel:
    config, tensors = read_checkpoint(FILE)
    names = Names("embed", "head", "norm", "{}.", "attn_norm", "q", "k", "v", "q_norm", "k_norm", "out", "ffn_norm",
                  "gate", "up", "down")  # fmt: skip
    weights = assemble(config, names, tensors.__getitem__, paired=True)
    check_shapes(config, weights)
    return LoadedModel(ModelSpec("stories260K"), Decoder(config, weights), config, ByteTokenizer(), "")


def test_it_tells_a_story(stories: LoadedModel) -> None:
    pieces = words()
    story = b"".join(pieces[i] for i in generate(stories, [BOS], Sampling(max_tokens=60, ignore_eos=True)))
    assert story.decode().startswith(" Once upon a time, there was a little girl named Lily.")


def test_its_logits_are_those_of_transformers(stories: LoadedModel) -> None:
    config, tensors = read_checkpoint(FILE)
    oracle = LlamaForCausalLM(
        llama_shape(
            config,
            max_position_embeddings=config.context_length,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    ).eval()

    def halves(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(-1, config.head_dim // 2, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)

    theirs = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    theirs |= {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "out": "self_attn.o_proj"}
    theirs |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    state = {"model.embed_tokens.weight": tensors["embed.weight"], "model.norm.weight": tensors["norm.weight"]}
    for layer in range(config.layers):
        for ours, name in theirs.items():
            tensor = tensors[f"{layer}.{ours}.weight"]
            state[f"model.layers.{layer}.{name}.weight"] = halves(tensor) if ours in "qk" else tensor
    oracle.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in state.items()}, strict=False)
    oracle.tie_weights()
    ids = [BOS, *generate(stories, [BOS], Sampling(max_tokens=200, ignore_eos=True))]
    assert (our_logits(stories, ids) - their_logits(oracle, ids)).abs().max() < 1e-4


def test_every_block_of_a_story_matters(stories: LoadedModel) -> None:
    story = [BOS, *generate(stories, [BOS], Sampling(max_tokens=149, ignore_eos=True))]
    assert blocks_without_effect(stories, story, max_tokens=200) == []
