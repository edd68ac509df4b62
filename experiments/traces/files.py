"""Opening a trace's file or directory: which format it is, lines with their numbers, gzip. Raises TraceError."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.traces.trace import TraceError

MOST_LINE_BYTES = 64 << 20


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of each line that is not blank, also of a gzipped file."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            while raw := stream.readline(MOST_LINE_BYTES):
                number += 1
                if not raw.endswith(b"\n") and len(raw) == MOST_LINE_BYTES:
                    raise TraceError(path, number, f"a line longer than {MOST_LINE_BYTES >> 20} MiB")
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield number, text
    except UnicodeDecodeError:
        raise TraceError(path, number, "not UTF-8 text; is it compressed, or another kind of file?") from None
    except (EOFError, zlib.error):
        raise TraceError(path, number + 1, "the compressed file is truncated or damaged; fetch it again") from None
    except gzip.BadGzipFile:
        raise TraceError(path, None, "not a gzip file although it is called .gz") from None
    except OSError as error:
        raise TraceError(path, None, f"cannot be read: {error.strerror or error}") from None


def parse_object(path: Path, line: int, text: str) -> dict[str, Any]:
    """A line's JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise TraceError(path, line, f"not JSON ({error}); the line may be cut short") from None
    except RecursionError:
        raise TraceError(path, line, "JSON nested too deeply") from None
    if not isinstance(value, dict):
        raise TraceError(path, line, f"a JSON {type(value).__name__} where a request's object is expected")
    return value


def whole(path: Path, line: int | None, row: dict[str, Any], key: str, minimum: int, maximum: int = 1 << 40) -> int:
    """`row[key]` as a whole number within bounds (10.0 is one, true is not)."""
    if key not in row:
        raise TraceError(path, line, f'"{key}" is missing')
    return as_whole(path, line, row[key], key, minimum, maximum)


def as_whole(path: Path, line: int | None, value: Any, key: str, minimum: int, maximum: int = 1 << 40) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise TraceError(path, line, f'"{key}" is {value!r}; it must be a whole number from {minimum} to {maximum}')
    return value


def fits(count: int, tokens: int, block_tokens: int) -> bool:
    """Whether so many ids are those of a prompt's blocks: of all of them, or of the full ones."""
    return count in (tokens // block_tokens, -(-tokens // block_tokens))


def ids(path: Path, line: int | None, row: dict[str, Any], tokens: int, block_tokens: int) -> tuple[int, ...]:
    """`hash_ids`, which must be one whole number for each block of the prompt; the last one in part may have none."""
    given = row.get("hash_ids")
    if not isinstance(given, list):
        raise TraceError(path, line, f'"hash_ids" is {given!r:.40}; it must be a list of whole numbers')
    wrong = next((value for value in given if type(value) is not int), None)
    if wrong is not None:
        raise TraceError(path, line, f'"hash_ids" has {wrong!r:.40}; it must be a list of whole numbers')
    if not fits(len(given), tokens, block_tokens):
        reason = f'{len(given)} "hash_ids" for a prompt of {tokens} tokens in blocks of {block_tokens}'
        raise TraceError(path, line, f"{reason}; the line is damaged, or --block-tokens is another")
    return tuple(given)
