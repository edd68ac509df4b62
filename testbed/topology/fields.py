"""The kinds of value a topology file has, as pydantic types: how each is read, and its JSON Schema.

Owns single values that are no addresses (a duration, a percentage, a whole number, a name); `schema` says
which field has which, `checks` what must hold between them. A reader raises ValueError with one sentence
that quotes the value and says what would be accepted.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from testbed.model.units import (
    DURATION,
    PERCENT_ACCEPTED,
    PERCENT_PATTERN,
    RATE,
    SIZE,
    Quantity,
    UnitError,
    parse_percent,
    quote,
)
from testbed.topology.names import ACCEPTED, NAME_PATTERN, check_host_name, check_name

_INTEGER = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_DECIMAL = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?", re.ASCII)
_ALGORITHM = r"[a-z][a-z0-9_-]{0,14}"  # the kernel's TCP_CA_NAME_MAX is 16 with its NUL
_VARIABLE = "[A-Za-z_][A-Za-z0-9_]*"
SETTABLE = frozenset({"PDDBED_KV_BYTES"})  # of the lab's own variables
MAX_FACTOR = 1000
MAX_QUOTA_PERCENT = 102_400  # 1,024 CPUs
MIN_RATE_BPS = 1000
NO_LIMIT = 0  # a rate that was written as none
MAX_DELAY_NS = 60 * 60 * 10**9  # TCP gives up long before an hour
MAX_DRAIN_NS = 60 * 60 * 10**9  # what workers accept
MAX_FABRIC_RATE_BPS = 10**13  # tbf counts a queue of 2 ms in 32 bits
MAX_FABRIC_DELAY_NS = 100_000_000  # further away is another datacenter, and a WAN link leads there


def text_of(value: Any, accepted: str) -> str:
    """`value` as it was typed; nothing, a list or a mapping is refused with what was expected."""
    if value is None:
        raise ValueError(f"is empty; write {accepted}")
    if isinstance(value, dict | list):
        raise ValueError(f"is {'a mapping' if isinstance(value, dict) else 'a list'}; write {accepted}")
    return str(value)


class Reads:
    """Annotates a type with the function that makes it from YAML, and the JSON Schema of what that takes."""

    def __init__(self, read: Callable[[Any], Any], kind: Quantity | None = None, **schema: Any) -> None:
        self.read = read
        self.kind = kind
        self._schema = schema

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, _core: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return dict(self._schema)


def quantity(kind: Quantity, least: int = 0, most: int | None = None) -> Reads:
    """Durations, rates or sizes, in base units, from `least` to `most`."""

    def read(value: Any) -> int:
        number = kind.parse(text_of(value, kind.accepted))
        if number < least:
            raise UnitError(f"{quote(value)} is too small; the least is {kind.format(least)}")
        if most is not None and number > most:
            raise UnitError(f"{quote(value)} is too large; the most is {kind.format(most)}")
        return number

    examples = kind.examples.replace(" or ", ", ").split(", ")
    return Reads(read, kind, type="string", pattern=kind.pattern, description=kind.accepted, examples=examples)


def percent(most: int = 100, *, above_zero: bool = False) -> Reads:
    """Percentages, as shares of 1."""

    def read(value: Any) -> float:
        share = parse_percent(text_of(value, PERCENT_ACCEPTED), most)
        if above_zero and share == 0:
            raise UnitError(f"{quote(value)} is nothing at all; write more than 0%")
        return share

    return Reads(read, type="string", pattern=PERCENT_PATTERN, description=PERCENT_ACCEPTED)


def whole(least: int, most: int) -> Reads:
    """Whole numbers from `least` to `most`."""
    accepted = f"a whole number from {least:,} to {most:,}"

    def read(value: Any) -> int:
        text = text_of(value, accepted)
        if not _INTEGER.fullmatch(text) or not least <= int(text) <= most:
            raise ValueError(f"{quote(text)} is not {accepted}")
        return int(text)

    return Reads(read, type="integer", minimum=least, maximum=most)


def _read_rate_or_none(value: Any) -> int:
    if value == "none":
        return NO_LIMIT
    try:
        return quantity(RATE, least=MIN_RATE_BPS).read(value)
    except UnitError as error:
        raise UnitError(f"{error}; or write none for no limit") from None


def _read_factor(value: Any) -> float:
    accepted = f"a number such as 1.5, above 0 and at most {MAX_FACTOR:,} (a multiple, so it has no unit)"
    text = text_of(value, accepted)
    if not _DECIMAL.fullmatch(text) or not 0 < float(text) <= MAX_FACTOR:
        raise ValueError(f"{quote(text)} is not {accepted}")
    return float(text)


def _read_flag(value: Any) -> bool:
    text = text_of(value, "true or false").lower()
    if text not in ("true", "false"):
        raise ValueError(f"{quote(value)} is not true or false")
    return text == "true"


def _read_name(value: Any) -> str:
    return check_name(text_of(value, f"a name: {ACCEPTED}"))


def _read_host_name(value: Any) -> str:
    return check_host_name(_read_name(value))


def _read_variable(value: Any) -> str:
    text = text_of(value, "the name of a variable")
    if not re.fullmatch(_VARIABLE, text, re.ASCII):
        raise ValueError(f"{quote(text)} is no name of a variable; write letters, digits and _")
    if text.startswith("PDDBED_") and text not in SETTABLE:
        raise ValueError(f"{quote(text)} is set by the lab; choose a name without PDDBED_")
    return text


def _read_string(value: Any) -> str:
    text = text_of(value, 'text, or "" for none')
    if "\0" in text:
        raise ValueError("has a NUL character in it; remove it")
    return text


def _read_line(value: Any) -> str:
    text = _read_string(value).strip()
    if not text:
        raise ValueError("is empty; write some text or remove the key")
    return text


def _read_algorithm(value: Any) -> str:
    accepted = "the name of a congestion control such as cubic, reno or bbr"
    text = text_of(value, accepted)
    if not re.fullmatch(_ALGORITHM, text, re.ASCII):
        raise ValueError(f"{quote(text)} is not {accepted}")
    return text


Duration = Annotated[int, quantity(DURATION)]
Delay = Annotated[int, quantity(DURATION, most=MAX_DELAY_NS)]
Drain = Annotated[int, quantity(DURATION, most=MAX_DRAIN_NS)]
FabricRate = Annotated[int, quantity(RATE, least=MIN_RATE_BPS, most=MAX_FABRIC_RATE_BPS)]
FabricDelay = Annotated[int, quantity(DURATION, most=MAX_FABRIC_DELAY_NS)]
Rate = Annotated[int, quantity(RATE, least=MIN_RATE_BPS)]
RateOrNone = Annotated[int, Reads(_read_rate_or_none, RATE, type="string", pattern=f"^none$|{RATE.pattern}")]
Size = Annotated[int, quantity(SIZE, least=1)]
Percent = Annotated[float, percent()]
Quota = Annotated[float, percent(MAX_QUOTA_PERCENT, above_zero=True)]
Factor = Annotated[float, Reads(_read_factor, type="number", exclusiveMinimum=0, maximum=MAX_FACTOR)]
Flag = Annotated[bool, Reads(_read_flag, type="boolean")]
Name = Annotated[str, Reads(_read_name, type="string", pattern=NAME_PATTERN, description=f"A name: {ACCEPTED}")]
HostName = Annotated[str, Reads(_read_host_name, type="string", pattern=NAME_PATTERN)]
Variable = Annotated[str, Reads(_read_variable, type="string", pattern=f"^{_VARIABLE}$")]
String = Annotated[str, Reads(_read_string, type=["string", "number", "boolean"])]
Line = Annotated[str, Reads(_read_line, type="string", minLength=1)]
Algorithm = Annotated[
    str, Reads(_read_algorithm, type="string", pattern=f"^{_ALGORITHM}$", examples=["cubic", "reno", "bbr"])
]
