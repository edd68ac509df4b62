"""A mistake at a path, as checks yield it. Turned into a `Problem` with file and line by the loader."""

from dataclasses import dataclass

from testbed.topology.problems import Path


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake between values that are each fine. `at_key` points at the key, not at its value."""

    path: Path
    message: str
    at_key: bool = False
