"""Durations, rates, sizes and percentages as people write them, and as exact numbers.

Owns the strict reading (`20ms`, `1.5gbit`, `8MiB`, `0.1%`), the shortest exact writing (`format_*`) and a short one
for reading only (`short_*`: `2MB`, `33.3mbit`). One unit per quantity inside the program: nanoseconds, bits per
second, bytes, shares of 1. Knows no file and no field.

The grammar is narrower than tc's on purpose: there `20` means 20 microseconds for a delay and bits for a
rate, `mbps` means mega*bytes*, and `kb` is 1,024 bytes. Here a unit is required, one spelling, one meaning.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

MAX_VALUE = 2**63 - 1  # what a signed 64-bit netlink attribute holds: 292 years of nanoseconds
_MAX_CHARACTERS = 64
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?", re.ASCII)
_LOOSE = re.compile(r"\s*([+-]?)\s*([0-9][0-9_,]*(?:\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?\s*(.*)", re.I | re.S)


class UnitError(ValueError):
    """A text is not the quantity it should be; the message quotes it and says what would be accepted."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """One kind of quantity: its units as multiples of the base unit, smallest first."""

    noun: str  # "a duration"
    base: str  # "nanoseconds", for messages about fractions of the base unit
    units: Mapping[str, int]
    examples: str
    traps: Mapping[str, str]  # what people also write -> what to write instead

    @property
    def accepted(self) -> str:
        """Text of what would be accepted, for messages and descriptions."""
        return f"{self.noun} such as {self.examples} (units: {', '.join(self.units)})"

    @property
    def pattern(self) -> str:
        """The grammar as a regular expression (ECMA 262, for JSON Schema)."""
        return rf"^[0-9]+(\.[0-9]+)?({'|'.join(_spelling(unit) for unit in self.units)})$"

    def parse(self, text: Any) -> int:
        """The exact whole number of base units in `text`. Raises UnitError."""
        shown = quote(text)
        if not isinstance(text, str):
            raise UnitError(f"{shown} has no unit; write {self.accepted}")
        number, unit = _split(text, self.accepted)
        unit = _canonical(unit)
        if unit in self.traps:
            raise UnitError(f"{shown}: {self.traps[unit]}")
        if unit not in self.units:
            raise UnitError(f'{shown} has an unknown unit "{printable(unit)}"; write {self.accepted}')
        value = Fraction(number) * self.units[unit]
        if value.denominator != 1:
            raise UnitError(f"{shown} is not a whole number of {self.base}; write fewer digits")
        if value > MAX_VALUE:
            raise UnitError(f"{shown} is absurdly large; the most is 2^63 - 1 {self.base}")
        return int(value)

    def format(self, value: int) -> str:
        """The shortest text without a leading zero that `parse` reads back as exactly `value` (never negative)."""
        if not 0 <= value <= MAX_VALUE:
            raise UnitError(f"{value} {self.base} is outside of 0 to 2^63 - 1")
        texts = []
        for unit, factor in self.units.items():
            number = _terminating(Fraction(value, factor))
            if number is not None:
                texts.append(number + unit)
        # Shortest, but 800ms rather than 0.8s; of equally short texts the least digits (2min, not 120s).
        return min(texts, key=lambda text: (text.startswith("0."), len(text), sum(map(str.isdigit, text))))


DURATION = Quantity(
    noun="a duration",
    base="nanoseconds",
    units={"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9},
    examples="20ms, 1.5s or 250us",
    traps={
        "m": 'is "m" minutes or milliseconds? write min or ms',
        "\u00b5s": "write us for microseconds",
        "\u03bcs": "write us for microseconds",
        "usec": "write us for microseconds",
        "usecs": "write us for microseconds",
        "msec": "write ms for milliseconds",
        "msecs": "write ms for milliseconds",
        "Ms": "write ms for milliseconds (Ms would be megaseconds)",
        "MS": "write ms for milliseconds",
        "sec": "write s for seconds",
        "secs": "write s for seconds",
        "h": "write hours in min: 1 hour is 60min",
    },
)

_BYTES_OR_BITS = "a rate is written in bits per second (400mbit); tc reads {0} as {1}bytes per second"
RATE = Quantity(
    noun="a rate",
    base="bits per second",
    units={"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12},
    examples="400mbit, 1.5gbit or 64kbit",
    traps={
        "bps": _BYTES_OR_BITS.format("bps", ""),
        "kbps": _BYTES_OR_BITS.format("kbps", "kilo"),
        "mbps": _BYTES_OR_BITS.format("mbps", "mega"),
        "gbps": _BYTES_OR_BITS.format("gbps", "giga"),
        "Mbps": _BYTES_OR_BITS.format("Mbps", "mega"),
        "Gbps": _BYTES_OR_BITS.format("Gbps", "giga"),
        "k": 'write kbit, the whole unit ("k" alone could be bits or bytes)',
        "m": 'write mbit, the whole unit ("m" alone could be bits or bytes)',
        "g": 'write gbit, the whole unit ("g" alone could be bits or bytes)',
        "M": 'write mbit, the whole unit ("M" alone could be bits or bytes)',
        "G": 'write gbit, the whole unit ("G" alone could be bits or bytes)',
        "kibit": "rates are decimal (1kbit is 1,000 bit/s); write bit, kbit or mbit",
        "mibit": "rates are decimal (1mbit is 1,000,000 bit/s); write bit, kbit or mbit",
        "gibit": "rates are decimal (1gbit is 1,000,000,000 bit/s); write bit, mbit or gbit",
        "mbit/s": "write mbit without /s",
        "gbit/s": "write gbit without /s",
        "kbit/s": "write kbit without /s",
        "Mb/s": "write mbit for megabits per second",
        "MB/s": "write a rate in bits: 1 MB/s is 8mbit",
    },
)

_DECIMAL_OR_BINARY = "is {0} a thousand's or 1,024's power? write {1} for 1,024's powers, or B for bytes"
SIZE = Quantity(
    noun="a size",
    base="bytes",
    units={"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
    examples="64MiB, 1.5GiB or 1500B",
    traps={
        **{
            spelling: _DECIMAL_OR_BINARY.format(spelling, f"{letter}iB")
            for letter in "KMGT"
            for spelling in (letter, letter.lower(), letter + "B", letter.lower() + "B", letter.lower() + "b")
        },
        **{
            spelling: f"write {letter}iB"
            for letter in "KMGT"
            for spelling in (letter.lower() + "ib", letter.lower() + "iB", letter + "ib", letter + "IB")
        },
        "b": "is b bits or bytes? write B for bytes",
        "bytes": "write B for bytes",
    },
)

PERCENT_PATTERN = r"^[0-9]+(\.[0-9]+)?%$"
PERCENT_ACCEPTED = "a percentage such as 1%, 0.1% or 50%"


def parse_duration(text: Any) -> int:
    """Nanoseconds: `20ms` is 20,000,000. Raises UnitError."""
    return DURATION.parse(text)


def parse_rate(text: Any) -> int:
    """Bits per second, decimal: `1.5gbit` is 1,500,000,000. Raises UnitError."""
    return RATE.parse(text)


def parse_size(text: Any) -> int:
    """Bytes, binary: `8MiB` is 8,388,608. Raises UnitError."""
    return SIZE.parse(text)


def parse_percent(text: Any, most: int = 100) -> float:
    """The share of 1 nearest to `text`: `0.1%` is 0.001. More than `most` percent raises UnitError."""
    shown = quote(text)
    if not isinstance(text, str):
        raise UnitError(f"{shown} has no percent sign; write {PERCENT_ACCEPTED}")
    number, unit = _split(text, PERCENT_ACCEPTED, missing="percent sign")
    if unit != "%":
        raise UnitError(f'{shown} does not end in a percent sign but in "{printable(unit)}"; write {PERCENT_ACCEPTED}')
    value = Fraction(number)
    if value > most:
        raise UnitError(f"{shown} is more than {most}%")
    return float(value / 100)


def format_duration(value_ns: int) -> str:
    """The shortest exact text: 20,000,000 is `20ms`."""
    return DURATION.format(value_ns)


def format_rate(value_bps: int) -> str:
    """The shortest exact text: 1,500,000,000 is `1.5gbit`."""
    return RATE.format(value_bps)


def format_size(value_bytes: int) -> str:
    """The shortest exact text: 8,388,608 is `8MiB`."""
    return SIZE.format(value_bytes)


def format_percent(share: float) -> str:
    """The shortest percentage that `parse_percent` reads back as exactly `share`: 0.001 is `0.1%`."""
    if not 0 <= share < float("inf"):
        raise UnitError(f"{share} is not a share of at least 0")
    number = _terminating(Fraction(repr(float(share))) * 100)
    assert number is not None  # a decimal times a hundred
    return number + "%"


def short_duration(value_ns: float, digits: int = 3) -> str:
    """About `digits` significant digits, for reading: 13,333,333 is `13.3ms`."""
    return _short(value_ns, DURATION, {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}, digits)


def short_rate(value_bps: float, digits: int = 3) -> str:
    """About `digits` significant digits, for reading: 33,333,333 is `33.3mbit`."""
    return _short(value_bps, RATE, RATE.units, digits)


def short_size(value_bytes: float, digits: int = 3) -> str:
    """About `digits` significant digits, for reading: 8,388,608 is `8MiB`, 2,000,000 is `2MB`.

    Decimal unless the binary text is exact; a file takes binary units only, and says so.
    """
    return _short(value_bytes, SIZE, {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}, digits)


def short_percent(share: float, digits: int = 3) -> str:
    """About `digits` significant digits, for reading: 0.0909 is `9.09%`."""
    if not 0 <= share < float("inf"):
        raise UnitError(f"{share} is not a share of at least 0")
    return _rounded(Fraction(share) * 100, digits) + "%"


def quote(value: Any, most: int = 60) -> str:
    """`value` in double quotes for a message, on one line, shortened, without control characters."""
    text = value if isinstance(value, str) else str(value)
    if len(text) > most:
        text = text[: most - 3] + "..."
    return f'"{printable(text)}"'


def told_apart(value: float, limit: float, least_digits: int = 1) -> tuple[str, str]:
    """Two shares of 1 as percentages with as many decimals as it takes to tell them apart, up to 9."""
    for digits in range(least_digits, 10):
        shown, shown_limit = f"{value:.{digits}%}", f"{limit:.{digits}%}"
        if shown != shown_limit:
            break
    return shown, shown_limit


def printable(text: str) -> str:
    """`text` on one line, control characters escaped (an error message must not drive the terminal)."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _split(text: str, accepted: str, missing: str = "unit") -> tuple[str, str]:
    """Number and unit of `text`, with a sentence for each way of writing a number that is not one of ours."""
    shown = quote(text)
    if len(text) > _MAX_CHARACTERS:
        raise UnitError(f"{shown} is too long; write {accepted}")
    if re.match(r"\s*[+-]?\s*(nan|inf)", text, re.I):
        raise UnitError(f"{shown} is not a finite number; write {accepted}")
    loose = _LOOSE.fullmatch(text)
    if loose is None:
        raise UnitError(f"{shown} is not {accepted}")
    sign, number, exponent, unit = loose.groups()
    if sign == "-":
        raise UnitError(f"{shown} is negative; write {accepted}")
    if sign or exponent or not _NUMBER.fullmatch(number):
        raise UnitError(f"{shown}: write the number in plain digits, as in {accepted}")
    unit = unit.rstrip()
    if not unit:
        raise UnitError(f"{shown} has no {missing}; write {accepted}")
    if text != number + unit:
        raise UnitError(f"{shown} has a space in it; write {printable(number + unit)}")
    return number, unit


def _canonical(unit: str) -> str:
    """`Mbit`, the SI spelling, is `mbit`: no rate is in millibits. Every other unit has one spelling."""
    return unit[0].lower() + unit[1:] if unit[1:] == "bit" else unit


def _spelling(unit: str) -> str:
    return f"[{unit[0]}{unit[0].upper()}]bit" if unit[1:] == "bit" else unit


def _short(value: float, quantity: Quantity, units: Mapping[str, int], digits: int) -> str:
    """The exact text where that is short, else rounded, in the largest of `units` with a number of at least 1."""
    if not 0 <= value <= MAX_VALUE:
        raise UnitError(f"{value} {quantity.base} is outside of 0 to 2^63 - 1")
    if value == int(value):
        exact = quantity.format(int(value))
        if sum(map(str.isdigit, exact)) <= digits:
            return exact
    for unit, factor in sorted(units.items(), key=lambda item: -item[1]):
        number = _rounded(Fraction(value) / factor, digits)
        if not number.startswith("0"):
            return number + unit
    return _rounded(Fraction(value), digits) + next(iter(units))


def _rounded(value: Fraction, digits: int) -> str:
    """`value` to `digits` significant digits, in plain digits, without zeros after the last that counts."""
    rounded = Decimal(value.numerator) / Decimal(value.denominator)
    rounded = Context(prec=digits).plus(rounded)
    text = f"{rounded:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _terminating(value: Fraction) -> str | None:
    """`value` in plain decimal digits, or None when they would not end (a third of a minute)."""
    rest = value.denominator
    twos = (rest & -rest).bit_length() - 1
    rest >>= twos
    fives = 0
    while rest % 5 == 0:
        rest //= 5
        fives += 1
    if rest != 1:
        return None
    places = max(twos, fives)
    digits = str(int(value * 10**places)).rjust(places + 1, "0")
    if places == 0:
        return digits
    return f"{digits[:-places]}.{digits[-places:]}"  # exact; Decimal's context would round beyond 28 digits
