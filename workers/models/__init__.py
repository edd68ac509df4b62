"""Models: configuration, loaders, tokenizers and the decoder. Knows no blocks, batches or networks."""

from workers.models.config import ModelConfig, ModelError, ModelSpec
from workers.models.load import LoadedModel, load_model
from workers.models.tokenizer import Detokenizer, Tokenizer

__all__ = ["Detokenizer", "LoadedModel", "ModelConfig", "ModelError", "ModelSpec", "Tokenizer", "load_model"]
