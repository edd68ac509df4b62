"""From a ModelSpec to a model ready to run: picks the loader, checks shapes, fingerprints, wraps as a module. Owns the
built-in models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from msgspec import structs

from workers.models.config import Latent, ModelConfig, ModelError, ModelSpec
from workers.models.decoder import Decoder
from workers.models.fetch import BUILT_IN, FETCHABLE, verified_path
from workers.models.generation_config import NO_DEFAULTS, RequestDefaults, request_defaults
from workers.models.gguf_checkpoint import load_gguf
from workers.models.hf_checkpoint import load_hf
from workers.models.tokenizer import BOS, BYTE_VOCAB, EOS, ByteTokenizer, Tokenizer
from workers.models.weights import DTYPES, Weights, check_shapes, expected_shapes, fingerprint

# The built-in models need no download and take a millisecond a token. Their spread is wide on purpose. At the customary
# 0.02 a random model repeats one token whatever its KV holds, and a test of equality passes with broken KV; here the
# answer depends on every block. Only printable characters (and, rarely, the end of the text) have an output weight, so
# that answers can be read.
STD = 0.12
QKV_STD = 0.18  # sharp attention: with 0.12 some short prompts still fall into a loop
EOS_STD = 0.08

TINY = ModelConfig(
    name="tiny",
    layers=4,
    hidden=128,
    intermediate=256,
    heads=8,
    kv_heads=2,
    head_dim=32,
    vocab=BYTE_VOCAB,
    context_length=4096,
    tied=False,
    bos_id=BOS,
    eos_ids=(EOS,),
)


TINY_MLA = ModelConfig(
    name="tiny-mla",
    layers=4,
    hidden=128,
    intermediate=256,
    heads=8,
    kv_heads=1,
    head_dim=48 + 16,
    vocab=BYTE_VOCAB,
    context_length=4096,
    tied=False,
    bos_id=BOS,
    eos_ids=(EOS,),
    latent=Latent(kv_rank=48, rope_dim=16, nope_dim=16, value_dim=16, query_rank=64),
)
"""Half of `tiny`'s KV: 64 numbers a token and layer."""

_SHARP = ("qkv", "first", "q_up", "k_up")


def tiny_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Weights of `TINY` or `TINY_MLA`, float32; the same for a seed on every machine (numpy's PCG64)."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        if name.endswith("norm"):
            weights[name] = np.ones(shape, np.float32)
        else:
            std = QKV_STD if name.endswith(_SHARP) else STD
            weights[name] = random.normal(0.0, std, shape).astype(np.float32)
    scale = np.zeros(config.vocab, np.float32)
    scale[ord(" ") : ord("~") + 1] = 1.0
    scale[EOS] = EOS_STD / STD
    weights["head"] *= scale
    return weights


_PARTS = (".safetensors", ".json", ".bin", ".pt", ".pth")
_BUILT_IN = {config.name: config for config in (TINY, TINY_MLA)}


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. `fingerprint` (32 hex digits) names configuration, dtype and weights together."""

    spec: ModelSpec
    model: Decoder
    config: ModelConfig
    tokenizer: Tokenizer
    fingerprint: str
    defaults: RequestDefaults = NO_DEFAULTS

    def on(self, device: str) -> LoadedModel:
        """The same model on `device`, its weights moved there. Raises ModelError when this machine has none such."""
        if device == self.spec.device:
            return self
        check_device(structs.replace(self.spec, device=device))
        return replace(self, spec=structs.replace(self.spec, device=device), model=self.model.to(device))


def check_device(spec: ModelSpec) -> None:
    """Raises ModelError unless this machine has the device. With PYTORCH_NVML_BASED_CUDA_CHECK=1 in the environment
    the question leaves the process fit to be forked.
    """
    if spec.device != "cpu" and not (spec.device.split(":")[0] == "cuda" and torch.cuda.is_available()):
        raise ModelError(f'model "{spec.name}": this machine has no device "{spec.device}"; use cpu')


def load_model(spec: ModelSpec) -> LoadedModel:
    """Loads what `spec` names; raises ModelError with the next step when it is missing or broken.

    On the CPU nothing here runs a torch operation, so that a process may load, then fork its workers: they
    share the weights copy-on-write and start thread pools of their own.
    """
    if spec.dtype not in DTYPES:
        raise ModelError(f'model "{spec.name}": unknown dtype "{spec.dtype}"; use one of {", ".join(DTYPES)}')
    config, weights, tokenizer, defaults = _load(spec)
    model = Decoder(config, weights, spec.dtype)
    host = structs.replace(spec, device="cpu")
    identity = fingerprint(config, weights, spec.dtype)
    return LoadedModel(host, model, config, tokenizer, identity, defaults).on(spec.device)


def _load(spec: ModelSpec) -> tuple[ModelConfig, Weights, Tokenizer, RequestDefaults]:
    if spec.name in BUILT_IN:
        config = _BUILT_IN[spec.name]
        return config, tiny_weights(config, spec.seed), ByteTokenizer(), NO_DEFAULTS
    config, weights, tokenizer, defaults = _read(_locate(spec.name))
    return (replace(config, name=spec.name) if spec.name in FETCHABLE else config), weights, tokenizer, defaults


def _locate(name: str) -> Path:
    if name in FETCHABLE:
        return verified_path(FETCHABLE[name])
    path = Path(name)
    if path.is_dir() or path.is_file():
        files = sorted(file.name for file in path.iterdir() if file.suffix.lower() == ".gguf") if path.is_dir() else []
        if files and not (path / "config.json").exists():
            raise ModelError(f"{path} is no Hugging Face checkpoint; name the file in it, such as {path / files[0]}")
        if path.suffix.lower() in _PARTS and path.is_file():
            raise ModelError(f"{path} is one file of a checkpoint; name its directory, {path.parent}")
        return path
    if path.exists():
        raise ModelError(f"{path} is neither a directory nor a file; name a Hugging Face directory or a .gguf file")
    known = ", ".join([*BUILT_IN, *FETCHABLE])
    raise ModelError(
        f'unknown model "{name}": neither one of {known} nor an existing Hugging Face directory or .gguf file'
    )


def _read(path: Path) -> tuple[ModelConfig, Weights, Tokenizer, RequestDefaults]:
    try:
        defaults = request_defaults(path) if path.is_dir() else NO_DEFAULTS
        config, weights, tokenizer = load_hf(path) if path.is_dir() else load_gguf(path)
    except (
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        MemoryError,
        OSError,
    ) as error:
        # A checkpoint is foreign data: sizes that contradict each other surface wherever they are first used.
        raise ModelError(f"{path}: the checkpoint contradicts itself ({error}); fetch it again") from error
    check_shapes(config, weights)
    return config, weights, tokenizer, defaults
