"""Request traces: public formats read, traces generated, statistics, prompts in which equal block ids are equal tokens.

Everything is checked when a trace is read, with the file and line of the first mistake, before anything starts.
"""

from collections.abc import Callable
from pathlib import Path

from experiments.traces import agentic, azure, mooncake
from experiments.traces.trace import Request, Trace, TraceError

__all__ = ["Request", "Trace", "TraceError", "read_trace"]

FORMATS: dict[str, Callable[[Path, int | None], Trace]] = {
    "mooncake": mooncake.read,
    "agentic": agentic.read,
    "azure": azure.read,
}


def read_trace(path: Path, form: str = "auto", block_tokens: int | None = None) -> Trace:
    """The whole trace, checked. Raises TraceError with the line and the reason."""
    try:
        path.stat()
    except FileNotFoundError:
        raise TraceError(path, None, "no such file or directory") from None
    except (OSError, ValueError) as error:
        raise TraceError(path, None, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return FORMATS[_format(path) if form == "auto" else form](path, block_tokens)


def _format(path: Path) -> str:
    if path.is_dir():
        return "agentic"
    ending = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    found = {".jsonl": "mooncake", ".json": "agentic", ".csv": "azure"}.get(ending)
    if found is None:
        raise TraceError(
            path,
            None,
            "which format is it? .jsonl and .jsonl.gz are Mooncake's, .csv is Azure's, a directory of .json is "
            "agentic conversations; or name it with --format",
        )
    return found
