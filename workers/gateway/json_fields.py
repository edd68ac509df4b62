"""JSON to typed values, and what is wrong with it as an API error that names the place. Decodes no more than it must.

A field may be `msgspec.Raw`, checked as JSON but not read: a body of megabytes of `[[],[],..]` in it stays its bytes.
"""

import re
import reprlib
from contextlib import suppress
from typing import Any, TypeVar, overload

import msgspec
from msgspec import Raw

from workers.gateway.errors import ApiError

NULL = Raw(b"null")
MAX_NAME = 256  # characters of an unknown field that an error repeats
MAX_SHOWN_BYTES = 64 << 10  # of a body that is decoded once more, for the wrong value to be shown

T = TypeVar("T")

_PLACE = re.compile(r"(?s)(.*) - at `\$(.*)`\Z")
_UNKNOWN = re.compile(r"(?s)Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
# one value of a list: text, a list without text in it, or the name or number that stands for itself; never backtracks
_ITEM = re.compile(
    rb'[\s,]*+(?:("[^"\\]*+(?:\\.[^"\\]*+)*+")|(\[[^"\[\]{}]*+\])|([^\s,"\[\]{}]++)|(?=[\[{\]]))', re.DOTALL
)

_SHORT = reprlib.Repr()  # of a body of megabytes as well, in no time
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60
_SHORT.maxlist = _SHORT.maxdict = 3


@overload
def decode(data: bytes | bytearray | Raw, kind: type[T], place: str = "") -> T: ...
@overload
def decode(data: bytes | bytearray | Raw, kind: Any, place: str = "") -> Any: ...
def decode(data: bytes | bytearray | Raw, kind: Any, place: str = "") -> Any:
    """A value of a type. Raises ApiError (400); `param` is `place` and the path from there (`messages[2].name`)."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(error, data, place) from None
    except (msgspec.MsgspecError, RecursionError) as error:
        param = place or None
        raise ApiError(400, f"the body is not valid JSON: {error}", param=param, code="invalid_json") from None


def size(raw: Raw) -> int:
    """Bytes of a value as it was sent."""
    return len(memoryview(raw))


def first_byte(raw: Raw) -> bytes:
    """The byte that tells a value's kind: a quote, a bracket, a brace, or the beginning of a number or name."""
    return bytes(memoryview(raw)[:1])


def items(raw: Raw, most: int) -> list[bytes] | None:
    """The first `most` + 1 items of a list, undecoded; None when it is no list, or one that holds lists of lists."""
    if first_byte(raw) != b"[":
        return None
    found: list[bytes] = []
    position = 1
    while len(found) <= most:
        match = _ITEM.match(raw, position)
        if match is None or match.lastindex is None:
            break
        found.append(match[match.lastindex])
        position = match.end()
    else:
        return found
    rest = bytes(memoryview(raw)[position:]).strip(b" \t\r\n,")
    return found if rest == b"]" else None


def shown(value: Any) -> str:
    """A value for an error, shortened."""
    return _SHORT.repr(value)


def _refusal(error: msgspec.ValidationError, data: bytes | bytearray | Raw, place: str) -> ApiError:
    told, path = str(error), ""
    if match := _PLACE.match(told):
        told, path = match[1], match[2]
    param = (place + path).removeprefix(".")
    inside = param + "." if param else ""
    if match := _UNKNOWN.fullmatch(told):
        name = inside + match[1][:MAX_NAME]
        return ApiError(400, f"unknown parameter {name!r}; remove it", param=name, code="unknown_parameter")
    if match := _MISSING.fullmatch(told):
        return ApiError(400, f"{inside}{match[1]} is missing; give it", param=inside + match[1])
    expected = told.replace("`", "").replace("Expected", "expected")
    if not param:
        return ApiError(400, f"the body must be a JSON object: {expected}")
    got = ""
    if len(memoryview(data)) <= MAX_SHOWN_BYTES:
        with suppress(msgspec.MsgspecError):  # a number may fit the field's type and no other
            got = f" (got {shown(_at(msgspec.json.decode(data), path))})"
    return ApiError(400, f"{param}: {expected}{got}", param=param)


def _at(value: Any, path: str) -> Any:
    """The value at a path of msgspec's; the nearest one around it where a key is not told (`[...]`)."""
    for name, index in _STEP.findall(path.replace("[...]", "")):
        value = value[int(index)] if index else value.get(name)
    return value
