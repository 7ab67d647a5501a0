"""How an input that is right becomes one that is nearly right.

Bytes are changed as an unreliable disk or a stranger would: bits flip, pieces are missing, doubled or taken from
another input, numbers become the largest or the smallest of their width. Where the format has a structure (msgpack,
JSON), values inside it change too, so that the result can still be read and says something strange. Where a checksum
stands over all of it, every second input gets the right one: a checksum keeps mishaps away, and no enemy.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

Mutation: TypeAlias = Callable[[random.Random, Sequence[bytes]], bytes]
"""Makes an input of those that are right."""

_INTEGERS = (0, 1, 2, 7, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1)
_FLOATS = tuple(
    struct.unpack("<I", struct.pack("<f", value))[0]
    for value in (float("nan"), float("inf"), -float("inf"), 3.4028235e38, -3.4028235e38, 1e30, 1e-45, -0.0, 1.0)
)
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 255, 2**16, 2**31, 2**32, 2**48, 2**62, 2**63 - 1, -(2**63), 2**64 - 1,
    0.0, -1.0, 1e308, 5e-324, float("nan"), float("inf"), -float("inf"),
    "", "a", "a" * 300, "\x1b[2J\x07", "\u202e\u0000", "127.0.0.1:1", "[::1]:99999", "|" * 100, "rank 0", "F64", "<f8",
    "|V1000000000", "O", b"", b"\x00", b"\xff" * 64, [], {}, [[]], [0] * 100, ["a"] * 100, {"a": 1},
)  # fmt: skip
_DEEP_MSGPACK, _DEEP_JSON = msgspec.Raw(b"\x91" * 3000 + b"\xc0"), msgspec.Raw(b"[" * 3000 + b"]" * 3000)
_NUMBER = re.compile(rb"\d[\d_.]*")
_TOKENS = (
    b"0", b"-1", b"1e400", b"nan", b"inf", b"-inf", b"9" * 400, b"9" * 5000, b"4096", b"0x7fffffffffffffff", b'""',
    b'"1 Gb/s"', b'"-1 s"', b'"1e999 s"', b"[]", b"{}", b"true", b"[[", b"\x00", b"\xff\xfe", b"2026-02-30", b'"""',
    b"[" * 3000, b"a." * 2000,
)  # fmt: skip


def bytewise(draw: random.Random, valid: Sequence[bytes]) -> bytes:
    """A few changes of its bytes."""
    data = bytearray(draw.choice(valid))
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        _change(draw, data, valid)
    return bytes(data)


def _change(draw: random.Random, data: bytearray, valid: Sequence[bytes]) -> None:
    at = draw.randrange(len(data) + 1)
    end = min(len(data), at + draw.choice((1, 2, 4, 8, 16, draw.randint(0, len(data)))))
    match draw.randrange(9):
        case 0 | 1 | 2 if at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        case 3:
            del data[at:]
        case 4:
            del data[at:end]
        case 5:
            data[at:at] = data[at:end]
        case 6:
            other = draw.choice(valid)
            start = draw.randrange(len(other) + 1)
            data[at:] = other[start:]
        case 7:
            width, order = draw.choice((1, 2, 4, 8)), draw.choice(("big", "little"))
            value = draw.choice(_INTEGERS) % (1 << 8 * width)
            data[at : at + width] = value.to_bytes(width, order)
        case _:
            word = at - at % 4
            data[word : word + 4] = draw.choice(_FLOATS).to_bytes(4, "little")


def msgpack(draw: random.Random, valid: Sequence[bytes]) -> bytes:
    """Every second time values inside the message change, otherwise its bytes."""
    return _structured(draw, valid, msgspec.msgpack, _DEEP_MSGPACK)


def json(draw: random.Random, valid: Sequence[bytes]) -> bytes:
    """The same for JSON."""
    return _structured(draw, valid, msgspec.json, _DEEP_JSON)


def _structured(draw: random.Random, valid: Sequence[bytes], codec: Any, deep: msgspec.Raw) -> bytes:
    if draw.random() < 0.5:
        return bytewise(draw, valid)
    value = codec.decode(draw.choice(valid))
    for _ in range(draw.choice((1, 1, 2, 4))):
        value = _altered(draw, value, deep)
    encoded: bytes = codec.encode(value)
    return encoded


def json_lines(draw: random.Random, valid: Sequence[bytes]) -> bytes:
    """The same for JSON before a last line that seals it."""
    body, _, seal = draw.choice(valid).removesuffix(b"\n").rpartition(b"\n")
    return json(draw, [body]) + b"\n" + seal + b"\n"


def _altered(draw: random.Random, value: Any, deep: msgspec.Raw) -> Any:
    """One value somewhere inside is another one, missing, doubled, or nested deeper."""
    if isinstance(value, dict | list) and value and draw.random() < 0.9:
        inside = value.copy()
        key: Any = draw.choice(list(inside)) if isinstance(inside, dict) else draw.randrange(len(inside))
        match draw.randrange(12):
            case 0:
                del inside[key]
            case 1 if isinstance(inside, list):
                inside.append(inside[key])
            case 1:
                inside[draw.choice(("", "a", "type", "__metadata__"))] = inside[key]
            case 2:
                other = draw.choice(list(inside.values()) if isinstance(inside, dict) else inside)
                inside[key] = other
            case _:
                inside[key] = _altered(draw, inside[key], deep)
        return inside
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.4:
        return max(-(2**63), min(2**64 - 1, value + draw.choice((-1, 1, 2**31, 2**32, -(2**32)))))
    if isinstance(value, str | bytes) and value and draw.random() < 0.3:
        return value * draw.choice((2, 100)) if draw.random() < 0.5 else value[: draw.randrange(len(value))]
    return deep if draw.random() < 0.02 else draw.choice(_VALUES)


def text(draw: random.Random, valid: Sequence[bytes]) -> bytes:
    """Lines and words of a text that a person writes."""
    if draw.random() < 0.3:
        return bytewise(draw, valid)
    lines = draw.choice(valid).split(b"\n")
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(lines))
        match draw.randrange(5):
            case 0:
                lines.insert(at, draw.choice(draw.choice(valid).split(b"\n")))
            case 1 if len(lines) > 1:
                del lines[at]
            case 2:
                lines[at] = _NUMBER.sub(lambda match: draw.choice((match[0], *_TOKENS)), lines[at])
            case 3:
                key, equals, _ = lines[at].partition(b"=")
                lines[at] = key + equals + b" " + draw.choice(_TOKENS)
            case _:
                line = bytearray(lines[at])
                _change(draw, line, valid)
                lines[at] = bytes(line)
    return b"\n".join(lines)


def sealed(mutation: Mutation, seal: Callable[[bytes], bytes]) -> Mutation:
    """Every second input gets the checksum that it needs."""

    def mutate(draw: random.Random, valid: Sequence[bytes]) -> bytes:
        data = mutation(draw, valid)
        return seal(data) if draw.random() < 0.5 else data

    return mutate
