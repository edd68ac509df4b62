"""Models: configuration, loaders, tokenizers and the decoder. Knows no blocks, batches or networks.

Names are imported on first use: the command line asks for the list of models alone and should not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.models.chat import ChatRefusal, TemplateFault
    from workers.models.config import ModelConfig, ModelError, ModelSpec
    from workers.models.load import LoadedModel, load_model
    from workers.models.tokenizer import Detokenizer, Tokenizer

_HOMES = {
    "ChatRefusal": "chat",
    "ModelConfig": "config",
    "ModelError": "config",
    "ModelSpec": "config",
    "LoadedModel": "load",
    "load_model": "load",
    "Detokenizer": "tokenizer",
    "TemplateFault": "chat",
    "Tokenizer": "tokenizer",
}

__all__ = [
    "ChatRefusal",
    "Detokenizer",
    "LoadedModel",
    "ModelConfig",
    "ModelError",
    "ModelSpec",
    "TemplateFault",
    "Tokenizer",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"workers.models.{_HOMES[name]}"), name)
