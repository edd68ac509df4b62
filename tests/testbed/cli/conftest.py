"""The model whose own answer `pddbed ask` is compared with."""

from tests.workers.conftest import tiny

__all__ = ["tiny"]
