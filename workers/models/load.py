"""From a ModelSpec to a model ready to run: picks the loader, checks shapes, fingerprints, wraps as a
module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from workers.models.catalogue import BUILT_IN, FETCHABLE
from workers.models.config import ModelConfig, ModelError, ModelSpec
from workers.models.decoder import Decoder
from workers.models.fetch import verified_path
from workers.models.from_gguf import load_gguf
from workers.models.from_hf import load_hf
from workers.models.tiny import TINY, tiny_weights
from workers.models.tokenizer import ByteTokenizer, Tokenizer
from workers.models.weights import DTYPES, Weights, check_shapes, fingerprint


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. `fingerprint` (32 hex digits) names configuration, dtype and weights together."""

    spec: ModelSpec
    model: Decoder
    config: ModelConfig
    tokenizer: Tokenizer
    fingerprint: str


def load_model(spec: ModelSpec) -> LoadedModel:
    """Loads what `spec` names; raises ModelError with the next step when it is missing or broken.

    On the CPU nothing here runs a torch operation, so that a process may load, then fork its workers: they
    share the weights copy-on-write and start thread pools of their own.
    """
    if spec.dtype not in DTYPES:
        raise ModelError(f'model "{spec.name}": unknown dtype "{spec.dtype}"; use one of {", ".join(DTYPES)}')
    config, weights, tokenizer = _load(spec)
    check_shapes(config, weights)
    model = Decoder(config, weights, spec.dtype)
    if spec.device != "cpu":
        model.to(spec.device)
    return LoadedModel(spec, model, config, tokenizer, fingerprint(config, weights, spec.dtype))


def _load(spec: ModelSpec) -> tuple[ModelConfig, Weights, Tokenizer]:
    if spec.name == "tiny":
        return TINY, tiny_weights(spec.seed), ByteTokenizer()
    if spec.name in FETCHABLE:
        config, weights, tokenizer = load_gguf(verified_path(FETCHABLE[spec.name]))
        return replace(config, name=spec.name), weights, tokenizer
    path = Path(spec.name)
    if path.is_dir():
        return load_hf(path)
    if path.is_file():
        return load_gguf(path)
    known = ", ".join([*BUILT_IN, *FETCHABLE])
    raise ModelError(
        f'unknown model "{spec.name}": neither one of {known} nor an existing Hugging Face directory or .gguf file'
    )
