"""Values as people write them, and what to tell a person whose text means nothing.

A quantity is a number and its unit, as in "2.5 Gb/s" or "4 MiB".

In code it is a `float` (or `int`, for bytes) in the base unit of its dimension, so that code
computes with it as with any number; its type says which units its text may have and which
values make sense. Each unit has one spelling, and case matters: Mb/s is not MB/s.
The conversion is decimal, so "0.15 ms" is the same float as 0.00015.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, ClassVar, NamedTuple

import msgspec
from msgspec import inspect

_DECIMAL = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30}
_NUMBER_AND_UNIT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(.*?)\s*", re.ASCII)

_PROBLEM_AND_PLACE = re.compile(r"(.*?)(?: - at `\$([^`]*)`)?", re.DOTALL)


def _decimal(unit: str, prefixes: str = "kMGT", base: int = 1) -> dict[str, Decimal]:
    return {prefix + unit: base * Decimal(10) ** _DECIMAL[prefix] for prefix in ("", *prefixes)}


def _binary(unit: str, base: int = 1) -> dict[str, Decimal]:
    return {prefix + unit: base * Decimal(2) ** power for prefix, power in _BINARY.items()}


class Dimension(NamedTuple):
    """What a quantity measures, and the units that it may be written in."""

    what: str
    example: str
    units: Mapping[str, Decimal]
    hint: str = ""


TIME = Dimension(
    "a time",
    "0.15 ms",
    {unit: Decimal(scale) for unit, scale in
     (("ns", "1e-9"), ("us", "1e-6"), ("µs", "1e-6"), ("ms", "1e-3"), ("s", "1"), ("min", "60"), ("h", "3600"))},
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
)
MEMORY_RATE = Dimension("a memory bandwidth", "400 GB/s", _decimal("B/s") | _binary("B/s"), "GB/s are gigabytes")
WORK = Dimension("an amount of work", "200 GFLOP", _decimal("FLOP", "kMGTP"), "GFLOPS would be a speed")
SPEED = Dimension("a speed", "10.6 TFLOPS", _decimal("FLOPS", "kMGTP"), "GFLOP would be an amount of work")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A closing " (did you mean …?)" with the known words most like this one, or nothing."""
    names = list(known)
    close = [name for name in names if name.lower() == word.lower()] or get_close_matches(word, names, n=1)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def parse_quantity(text: str, dimension: Dimension) -> Decimal:
    """The value in the dimension's base unit; `ValueError` says what would be valid."""
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


class Quantity:
    """What the number types below share: how text becomes a value, and which values are allowed."""

    dimension: ClassVar[Dimension]
    zero_allowed: ClassVar[bool] = False
    negative_allowed: ClassVar[bool] = False

    @classmethod
    def value_of(cls, text: object) -> Decimal:
        """Check and convert what stands in a file."""
        if not isinstance(text, str):
            raise ValueError(f'expected text with a unit such as "{cls.dimension.example}"')
        value = parse_quantity(text, cls.dimension)
        rounded = float(value)
        if not math.isfinite(rounded):
            raise ValueError("this number is too large")
        if rounded < 0 and not cls.negative_allowed:
            raise ValueError(f"{cls.dimension.what} cannot be negative here")
        if rounded == 0 and not cls.zero_allowed:
            raise ValueError(f"{cls.dimension.what} must be more than zero here")
        return value


class Seconds(Quantity, float):
    """A time that may be zero, such as a latency."""

    dimension = TIME
    zero_allowed = True


class PositiveSeconds(Quantity, float):
    """A time that must pass, such as a duration."""

    dimension = TIME


class SignedSeconds(Quantity, float):
    """A time that may go backwards, such as a clock's jump."""

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
    """A whole number of bytes, possibly none."""

    dimension = SIZE
    zero_allowed = True


class PositiveBytes(Bytes):
    """At least one byte."""

    zero_allowed = False


class Share(float):
    """A part of the whole, from 0 to 1: a number, or text such as "0.12 %"."""

    zero_allowed: ClassVar[bool] = True


class PositiveShare(Share):
    """A part of the whole that is not nothing: a factor or an efficiency."""

    zero_allowed = False


def _share(kind: type[Share], value: object) -> Share:
    number: float | None = None
    if isinstance(value, str) and (match := _NUMBER_AND_UNIT.fullmatch(value)) and match[2] == "%":
        number = float(Decimal(match[1]) / 100)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    # A NaN fails this comparison too.
    if number is None or not 0 <= number <= 1 or (number == 0 and not kind.zero_allowed):
        least = "0" if kind.zero_allowed else "more than 0"
        raise ValueError(f'expected a number from {least} to 1, or a percentage such as "0.12 %"')
    return kind(number)


def decode_quantity(kind: type[Any], value: object) -> Any:
    """msgspec's `dec_hook` for every type of this file."""
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


def explain(error: msgspec.ValidationError, raw: dict[str, Any], tree: type[msgspec.Struct]) -> str:
    """Say where in `raw` the decoder stopped, what it found there, and what would be valid."""
    problem, place = _PROBLEM_AND_PLACE.fullmatch(str(error)).groups(default="")  # type: ignore[union-attr]
    keys = [int(index) if index else name for index, name in re.findall(r"\[(\d+)\]|([^.\[\]]+)", place)]
    value, words = _look_up(keys, raw, tree)
    valid = f"; valid: {', '.join(words)}" if words else ""
    path = place.lstrip(".")
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem):
        where = f"{path}.{unknown[1]}".lstrip(".")
        return f"{where}: unknown key{did_you_mean(unknown[1], words)}{valid}"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        choose = valid if missing[1] not in words else ""
        return f"{path or 'the file'}: the key {missing[1]} is missing{choose}"
    if problem.startswith("Invalid"):
        problem = f"not known here{did_you_mean(str(value), words)}{valid}"
    found = "" if isinstance(value, (dict, list)) else f" = {json.dumps(value, ensure_ascii=False, default=str)}"
    return f"{path}{found}: {problem.replace('`object`', '`table`')}"


def _look_up(keys: list[int | str], raw: Any, tree: type[msgspec.Struct]) -> tuple[Any, tuple[str, ...]]:
    """The value at that place, and the words (keys, tags or choices) that the tree has there."""
    kind: Any = inspect.type_info(tree)
    for key in keys:
        kind = _chosen(kind, raw)
        if isinstance(kind, inspect.UnionType):  # only its tag has a place of its own
            return raw[key], _words(kind)
        raw = raw[key]
        if isinstance(kind, inspect.StructType):
            kind = next(entry.type for entry in kind.fields if entry.encode_name == key)
        elif isinstance(kind, inspect.VarTupleType):
            kind = kind.item_type
        elif isinstance(kind, inspect.TupleType):
            kind = kind.item_types[int(key)]
    return raw, _words(_chosen(kind, raw))


def _words(kind: Any) -> tuple[str, ...]:
    if isinstance(kind, inspect.StructType):
        return (*filter(None, [kind.tag_field]), *(entry.encode_name for entry in kind.fields))
    if isinstance(kind, inspect.LiteralType):
        return tuple(map(str, kind.values))
    if isinstance(kind, inspect.UnionType):
        return tuple(str(one.tag) for one in kind.types if isinstance(one, inspect.StructType) and one.tag)
    return ()


def _chosen(kind: Any, raw: Any) -> Any:
    """The struct that a table chose from a union by its tag, where it did."""
    if not isinstance(kind, inspect.UnionType) or not isinstance(raw, dict):
        return kind
    structs = [one for one in kind.types if isinstance(one, inspect.StructType)]
    chosen = [one for one in structs if one.tag_field is None or one.tag == raw.get(one.tag_field)]
    return chosen[0] if chosen else kind
