"""Opening a trace's file: lines with their numbers, gzip, and fields within bounds. Raises TraceError.

Every bound is far above what any trace has and far below what harms: a file of a kilobyte must not cost a gigabyte.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from reprlib import Repr
from typing import Any, BinaryIO

from experiments.traces.trace import TraceError

MOST_TOKENS = 1 << 24  # of a prompt or an answer
MOST_ID = (1 << 64) - 1
MOST_LINE_BYTES = 8 << 20  # JSON takes up to 25 times as much once it is read
MOST_RATIO = 100  # of a gzipped trace, which has 4 to 30
RATIO_FROM_BYTES = 4 << 20
PIECE_BYTES = 1 << 20

_short = Repr()
_short.maxstring = _short.maxother = _short.maxlong = 40
_short.maxlist = _short.maxdict = 3


def shown(value: Any) -> str:
    """A value for a message: short, however long or deep it is."""
    return f"{_short.repr(value):.80}"


class _Unpacked:
    """Contents of a gzip file, as long as it is no bomb."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._packed = path.open("rb")
        self._stream = gzip.GzipFile(fileobj=self._packed)
        self._bytes = 0

    def read(self, count: int) -> bytes:
        data = self._stream.read1(count)
        self._bytes += len(data)
        if self._bytes > max(RATIO_FROM_BYTES, MOST_RATIO * self._packed.tell()):
            reason = f"unpacks to more than {MOST_RATIO} times its size; that is no trace"
            raise TraceError(self._path, None, reason)
        return data

    def close(self) -> None:
        self._stream.close()
        self._packed.close()


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of each line that is not blank, also of a gzipped file."""
    number = 0
    try:
        stream = _Unpacked(path) if path.suffix == ".gz" else path.open("rb")
        try:
            for number, raw in enumerate(_lines(path, stream), 1):
                if raw and (text := raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()):
                    yield number, text
        finally:
            stream.close()
    except UnicodeDecodeError:
        raise TraceError(path, number, "not UTF-8 text; is it compressed, or another kind of file?") from None
    except (EOFError, zlib.error):
        raise TraceError(path, number + 1, "the compressed file is truncated or damaged; fetch it again") from None
    except gzip.BadGzipFile:
        if number:
            raise TraceError(path, number + 1, "the compressed file is damaged; fetch it again") from None
        raise TraceError(path, None, "not a gzip file although it is called .gz, or damaged; fetch it again") from None
    except OSError as error:
        raise TraceError(path, None, f"cannot be read: {error.strerror or error}") from None


def _lines(path: Path, stream: _Unpacked | BinaryIO) -> Iterator[bytes]:
    """Each line, blank ones as nothing: a file of a billion of them is read in pieces."""
    rest, number = b"", 0
    while piece := stream.read(PIECE_BYTES):
        *whole, rest = (rest + piece).split(b"\n")
        number += len(whole)
        if len(rest) > MOST_LINE_BYTES:
            raise TraceError(path, number + 1, f"a line longer than {MOST_LINE_BYTES >> 20} MiB")
        yield from whole
    if rest:
        yield rest


def parse_object(path: Path, line: int, text: str) -> dict[str, Any]:
    """A line's JSON object."""
    value = parse(path, line, text, "the line may be cut short")
    if not isinstance(value, dict):
        raise TraceError(path, line, f"a JSON {type(value).__name__} where a request's object is expected")
    return value


def parse(path: Path, line: int | None, text: str, perhaps: str) -> Any:
    """JSON of a trace. `line`: where the text stands, None for a whole file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(path, line or error.lineno, f"not JSON ({error.msg}); {perhaps}") from None
    except ValueError:  # Python converts no more digits
        digits = re.search(r"\d{4000,}", text)
        raise TraceError(
            path, line, f"a number of {len(digits[0]) if digits else 'thousands of'} digits; no field has one"
        ) from None
    except RecursionError:
        raise TraceError(path, line, "JSON nested too deeply") from None


def whole(path: Path, line: int | None, row: dict[str, Any], key: str, minimum: int, maximum: int = MOST_TOKENS) -> int:
    """`row[key]` as a whole number within bounds (10.0 is one, true is not)."""
    if key not in row:
        raise TraceError(path, line, f'"{key}" is missing')
    return as_whole(path, line, row[key], key, minimum, maximum)


def as_whole(path: Path, line: int | None, value: Any, key: str, minimum: int, maximum: int = MOST_TOKENS) -> int:
    if isinstance(value, float) and value.is_integer() and abs(value) <= MOST_ID:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise TraceError(
            path, line, f'"{key}" is {shown(value)}; it must be a whole number from {minimum} to {maximum}'
        )
    return value


def fits(count: int, tokens: int, block_tokens: int) -> bool:
    """True if so many ids are those of a prompt's blocks: of all of them, or of the full ones."""
    return count in (tokens // block_tokens, -(-tokens // block_tokens))


def ids(path: Path, line: int | None, row: dict[str, Any]) -> list[int]:
    """`hash_ids`: whole numbers of at most 64 bits."""
    given = row.get("hash_ids")
    if not isinstance(given, list):
        raise TraceError(path, line, f'"hash_ids" is {shown(given)}; it must be a list of whole numbers')
    if given and (any(type(value) is not int for value in given) or not 0 <= min(given) <= max(given) <= MOST_ID):
        wrong = next(value for value in given if type(value) is not int or not 0 <= value <= MOST_ID)
        raise TraceError(
            path, line, f'"hash_ids" has {shown(wrong)}; it must be a list of whole numbers from 0 to {MOST_ID}'
        )
    return given


def check_ids(path: Path, line: int | None, count: int, tokens: int, block_tokens: int) -> None:
    """One id for each block of the prompt; the last one in part may have none."""
    if not fits(count, tokens, block_tokens):
        reason = f'{count} "hash_ids" for a prompt of {tokens} tokens in blocks of {block_tokens}'
        raise TraceError(path, line, f"{reason}; the line is damaged, or --block-tokens is another")
