"""Quantities with units, as in "2.5 Gb/s" or "4 MiB".

In code a quantity is a `float` (or `int`, for bytes) in the base unit of its dimension, so it can be used
as any number. Its type defines the units that its text may have and the values that are valid. Each unit
has one spelling, and case matters: Mb/s is not MB/s. The conversion is decimal, so "0.15 ms" is the same
float as 0.00015.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, ClassVar, NamedTuple

_DECIMAL = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30}
_NUMBER_AND_UNIT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(.*?)\s*", re.ASCII)


def _decimal(unit: str, prefixes: str = "kMGT", base: int = 1) -> dict[str, Decimal]:
    return {prefix + unit: base * Decimal(10) ** _DECIMAL[prefix] for prefix in ("", *prefixes)}


def _binary(unit: str, base: int = 1) -> dict[str, Decimal]:
    return {prefix + unit: base * Decimal(2) ** power for prefix, power in _BINARY.items()}


class Dimension(NamedTuple):
    """The dimension of a quantity, and the units in which it may be written."""

    what: str
    example: str
    units: Mapping[str, Decimal]
    hint: str = ""
    least: float = 0.0
    """The least magnitude of a value other than zero."""
    most: float = math.inf

    @property
    def base(self) -> str:
        """The unit of the value in code."""
        return next(unit for unit, scale in self.units.items() if scale == 1)


TIME = Dimension(
    "a time",
    "0.15 ms",
    {unit: Decimal(scale) for unit, scale in
     (("ns", "1e-9"), ("us", "1e-6"), ("µs", "1e-6"), ("ms", "1e-3"), ("s", "1"), ("min", "60"), ("h", "3600"))},
    most=1e9,  # thirty years: the sum of several is still a number of nanoseconds that 64 bits hold
)  # fmt: skip
SIZE = Dimension(
    "a size",
    "4 MiB",
    _decimal("B") | _binary("B"),
    "MB (1,000,000 bytes) and MiB (1,048,576 bytes) are both accepted for a size; Mb would be megabits",
)
RATE = Dimension(
    "a rate",
    "2.5 Gb/s",
    _decimal("b/s") | _decimal("B/s", base=8) | _binary("B/s", base=8),
    "Mb/s are megabits, MB/s megabytes: both are accepted for a rate",
    least=1.0,  # whatever is sent takes a number of seconds that can be counted
)
MEMORY_RATE = Dimension("a memory bandwidth", "400 GB/s", _decimal("B/s") | _binary("B/s"), "GB/s are gigabytes")
WORK = Dimension("an amount of work", "200 GFLOP", _decimal("FLOP", "kMGTP"), "GFLOPS would be a speed")
SPEED = Dimension("a speed", "10.6 TFLOPS", _decimal("FLOPS", "kMGTP"), "GFLOP would be an amount of work")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" with the known words most similar to this one, or nothing."""
    names = list(known)
    close = [name for name in names if name.lower() == word.lower()] or get_close_matches(word, names, n=1)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def parse_quantity(text: str, dimension: Dimension) -> Decimal:
    """Return the value in the dimension's base unit. Raises `ValueError` that says what would be valid."""
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise ValueError(f'expected {dimension.what} such as "{dimension.example}"')
    number, unit = match.groups()
    if unit not in dimension.units:
        problem = f"{unit} is not a unit of {dimension.what}" if unit else f"{dimension.what} needs a unit"
        valid = f"valid units: {', '.join(dimension.units)}"
        hint = f". {dimension.hint}" if dimension.hint else ""
        raise ValueError(f"{problem}{did_you_mean(unit, dimension.units)}; {valid}{hint}")
    return Decimal(number) * dimension.units[unit]


def quantity_text(value: float, dimension: Dimension) -> str:
    """Return a text that is read back as this value, in the unit that takes the fewest digits."""
    if not value:
        return f"0 {dimension.base}"
    exact = Decimal(repr(value) if isinstance(value, float) else value)
    texts = []
    for unit, scale in dimension.units.items():
        number = exact / scale
        text = format(number.normalize(), "f")
        if float(Decimal(text) * scale) == float(exact):  # a quotient of two decimals may have no end
            texts.append((not 1 <= abs(number) < 1000, len(text), f"{text} {unit}"))
    return min(texts, key=lambda each: each[:2])[2]


class Quantity:
    """The base of the number types below: the conversion of text to a value, and the valid values."""

    dimension: ClassVar[Dimension]
    zero_allowed: ClassVar[bool] = False
    negative_allowed: ClassVar[bool] = False

    @classmethod
    def value_of(cls, text: object) -> Decimal:
        """Check and convert a value from a file."""
        if not isinstance(text, str):
            raise ValueError(f'expected text with a unit such as "{cls.dimension.example}"')
        value = parse_quantity(text, cls.dimension)
        rounded = float(value)
        if not math.isfinite(rounded) or abs(rounded) > cls.dimension.most:
            raise ValueError("this number is too large")
        if rounded < 0 and not cls.negative_allowed:
            raise ValueError(f"{cls.dimension.what} cannot be negative here")
        if rounded == 0 and not cls.zero_allowed:
            raise ValueError(f"{cls.dimension.what} must be more than zero here")
        if 0 < abs(rounded) < cls.dimension.least:
            base = next(iter(cls.dimension.units))
            raise ValueError(f"{cls.dimension.what} must be at least {cls.dimension.least:g} {base}")
        return value


class Seconds(Quantity, float):
    """A time that may be zero, such as a latency."""

    dimension = TIME
    zero_allowed = True


class PositiveSeconds(Quantity, float):
    """A time above zero, such as a duration."""

    dimension = TIME


class SignedSeconds(Quantity, float):
    """A time that may be negative, such as a clock's jump."""

    dimension = TIME
    zero_allowed = negative_allowed = True


class BitRate(Quantity, float):
    """Bits per second on a link."""

    dimension = RATE


class ByteRate(Quantity, float):
    """Bytes per second from memory."""

    dimension = MEMORY_RATE


class Flops(Quantity, float):
    """Floating-point operations."""

    dimension = WORK


class FlopRate(Quantity, float):
    """Floating-point operations per second."""

    dimension = SPEED


class Bytes(Quantity, int):
    """A number of bytes, possibly zero."""

    dimension = SIZE
    zero_allowed = True


class PositiveBytes(Bytes):
    """At least one byte."""

    zero_allowed = False


class Share(float):
    """A share, from 0 to 1: a number, or text such as "0.12 %"."""

    zero_allowed: ClassVar[bool] = True


class PositiveShare(Share):
    """A share above zero: a factor or an efficiency."""

    zero_allowed = False


def _share(kind: type[Share], value: object) -> Share:
    number: float | None = None
    if isinstance(value, str) and (match := _NUMBER_AND_UNIT.fullmatch(value)) and match[2] == "%":
        number = float(Decimal(match[1]) / 100)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = value  # a whole number may be larger than any float
    # A NaN fails this comparison too.
    if number is None or not 0 <= number <= 1 or (number == 0 and not kind.zero_allowed):
        least = "0" if kind.zero_allowed else "more than 0"
        raise ValueError(f'expected a number from {least} to 1, or a percentage such as "0.12 %"')
    return kind(number)


def decode_quantity(kind: type[Any], value: object) -> Any:
    """The `dec_hook` of msgspec for every type of this module."""
    if issubclass(kind, Share):
        return _share(kind, value)
    if issubclass(kind, Bytes):
        count = kind.value_of(value)
        if count != int(count):
            raise ValueError("a size must be a whole number of bytes")
        return kind(int(count))
    if issubclass(kind, Quantity):
        return kind(float(kind.value_of(value)))  # type: ignore[call-arg]
    raise NotImplementedError(f"{kind} cannot be read from a file")
