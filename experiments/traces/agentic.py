"""A directory of agentic conversations, one JSON file each, as kv-cache-tester publishes them.

A file: `id`, `block_size`, `hash_id_scope` and `requests`, each with `t` (seconds since the conversation began), `in`,
`out` and `hash_ids`; a request of type `subagent` holds requests of its own, whose times count from its own. With scope
`local` ids of different files are different blocks even where they are equal; `global` ones are shared.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.traces.files import MOST_LINE_BYTES, as_whole, check_ids, ids, parse, shown, whole
from experiments.traces.trace import Request, Trace, TraceError, in_order

MOST_DEPTH = 8
Key = tuple[int, int]  # which file (0: shared by all), id


def read(path: Path, block_tokens: int | None) -> Trace:
    """A directory, or one such file. Raises TraceError."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise TraceError(path, None, "no .json file in this directory")
    names: dict[Key, int] = {}
    requests: list[Request] = []
    size = block_tokens
    for number, file in enumerate(files, 1):
        conversation = _load(file)
        here = whole(file, None, conversation, "block_size", 1, 1 << 20)
        if size is not None and here != size:
            raise TraceError(file, None, f'"block_size" is {here}, and {size} elsewhere; one trace has one block size')
        size = here
        scope = conversation.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise TraceError(file, None, f'"hash_id_scope" is {shown(scope)}; it must be local or global')
        rows = list(_flat(file, conversation.get("requests"), 0.0, 0, "requests"))
        for turn, (place, time_s, row) in enumerate(sorted(rows, key=lambda entry: entry[1])):
            requests.append(_request(file, place, time_s, row, size, number, turn, names, scope == "local"))
    if not requests:
        raise TraceError(path, None, "holds no request")
    return Trace(in_order(requests), size or 0, "agentic", path.name)


def _load(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            data = stream.read(MOST_LINE_BYTES + 1)
        if len(data) > MOST_LINE_BYTES:
            raise TraceError(file, None, f"a conversation of more than {MOST_LINE_BYTES >> 20} MiB")
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise TraceError(file, None, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(file, None, "not UTF-8 text") from None
    value = parse(file, None, text, "the file may be cut short")
    if not isinstance(value, dict):
        raise TraceError(file, None, f"a JSON {type(value).__name__} where a conversation's object is expected")
    return value


def _flat(file: Path, rows: Any, base_s: float, depth: int, place: str) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Every real request with its place in the file and its time in seconds."""
    if not isinstance(rows, list):
        raise TraceError(file, None, f'"{place}" is not a list of requests')
    if depth > MOST_DEPTH:
        raise TraceError(file, None, f"subagents nested deeper than {MOST_DEPTH}")
    for index, row in enumerate(rows):
        here = f"{place}[{index}]"
        if not isinstance(row, dict):
            raise TraceError(file, None, f"{here} is not an object")
        time_s = row.get("t")
        if not isinstance(time_s, int | float) or isinstance(time_s, bool) or not 0 <= time_s < 1e8:
            raise TraceError(file, None, f'{here}: "t" is {shown(time_s)}; it must be seconds since the beginning')
        if row.get("type") == "subagent":
            yield from _flat(file, row.get("requests"), base_s + time_s, depth + 1, f"{here}.requests")
        else:
            yield here, base_s + time_s, row


def _request(
    file: Path,
    place: str,
    time_s: float,
    row: dict[str, Any],
    size: int,
    session: int,
    turn: int,
    names: dict[Key, int],
    local: bool,
) -> Request:
    try:
        length = as_whole(file, None, row.get("in"), "in", 1)
        given = ids(file, None, row)
        check_ids(file, None, len(given), length, size)
        output = as_whole(file, None, row.get("out"), "out", 0)
    except TraceError as error:
        raise TraceError(file, None, f"{place}: {error.reason}") from None
    scope = session if local else 0
    blocks = tuple(names.setdefault((scope, value), len(names) + 1) for value in given)
    return Request(round(time_s * 1e9), length, output, blocks, session - 1, turn)
