"""Protocol Buffers' encoding, as far as the files of Perfetto and of Chakra need it.

A field is its number and wire type, then a varint (type 0), eight bytes (1), a length and so many bytes (2), or four
bytes (5). A varint is seven bits to a byte, least significant first. The library `protobuf` and the generated schemas
would be dependencies for as many lines.

Reading takes bytes from anywhere: whatever is no message is a `ValueError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import TypeAlias

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
FieldValue: TypeAlias = int | memoryview

_FIXED64 = Struct("<Q")
_DOUBLE = Struct("<d")
_MASK = (1 << 64) - 1
_MOST_VARINT_BYTES = 10


def varint(value: int) -> bytes:
    value &= _MASK  # a negative number is its two's complement
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def uint(field: int, value: int) -> bytes:
    return varint(field << 3 | VARINT) + varint(value)


def fixed64(field: int, value: int) -> bytes:
    return varint(field << 3 | FIXED64) + _FIXED64.pack(value)


def double(field: int, value: float) -> bytes:
    return varint(field << 3 | FIXED64) + _DOUBLE.pack(value)


def delimited(field: int, value: bytes) -> bytes:
    return varint(field << 3 | DELIMITED) + varint(len(value)) + value


def text(field: int, value: str) -> bytes:
    return delimited(field, value.encode(errors="replace"))


def packed(field: int, values: list[int]) -> bytes:
    """Encode a repeated number; nothing if there is none."""
    return delimited(field, b"".join(map(varint, values))) if values else b""


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the number that begins there, and where it ends."""
    value = 0
    for count in range(_MOST_VARINT_BYTES):
        if at + count >= len(data):
            raise ValueError("it ends within a number")
        byte = data[at + count]
        value |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return value & _MASK, at + count + 1
    raise ValueError("a number has more than ten bytes")


def read_fields(message: memoryview) -> Iterator[tuple[int, FieldValue]]:
    """Yield the number and the value of each field; a delimited one as the bytes that it has."""
    at = 0
    while at < len(message):
        key, at = read_varint(message, at)
        kind = key & 7
        value: FieldValue
        if kind == VARINT:
            value, at = read_varint(message, at)
        elif kind in (FIXED64, DELIMITED, FIXED32):
            length, at = read_varint(message, at) if kind == DELIMITED else ({FIXED64: 8, FIXED32: 4}[kind], at)
            if length > len(message) - at:
                raise ValueError("it ends within a field")
            value = message[at : at + length]
            at += length
        else:
            raise ValueError(f"a field has wire type {kind}, which there is not")
        yield key >> 3, value


def signed(value: int) -> int:
    """Return the number whose two's complement this is."""
    return value - (1 << 64) if value >> 63 else value
