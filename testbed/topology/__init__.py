"""The topology file: what it may say, every mistake in it, and the plan it comes to.

`load_plan(path, name=None)` is the way in; it is imported on use, because `plan` alone must stay cheap to
import (the userspace WAN's relay does).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from testbed.topology.load import load_plan as load_plan
    from testbed.topology.problems import TopologyErrors as TopologyErrors

_EXPORTS = {"load_plan": "testbed.topology.load", "TopologyErrors": "testbed.topology.problems"}

__all__ = ["TopologyErrors", "load_plan"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_EXPORTS[name]), name)
