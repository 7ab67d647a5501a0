"""The header on the wire: it survives the trip, and no damaged or impossible one is taken."""

from __future__ import annotations

import struct
import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hcsim.errors import RemoteProtocolError, UsageError
from hcsim.runtime.frame import HEADER_BYTES, Header, Kind, decode_header, encode_header

U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
ANY_LENGTH = 2**32

SAMPLE = Header(1000, Kind.DATA, 3, 7, 1, 5, 2**40, 0xDEADBEEF, 6, 2**33, 2**34)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    length, offset = draw(U32), draw(st.integers(0, 2**63))
    total = draw(st.just(0) | st.integers(offset + length, 2**64 - 1))
    return Header(
        length, draw(st.sampled_from(Kind)), draw(U16), draw(U16), draw(U32), draw(U32), draw(U64), draw(U32),
        draw(U32), offset, total,
    )  # fmt: skip


def decoded(data: bytes, max_length: int = ANY_LENGTH) -> Header:
    return decode_header(data, max_length=max_length, peer="mini")


def forged(**fields: int) -> bytes:
    """A header with a right checksum and whatever fields one likes."""
    values = {
        "magic": b"hc", "version": 1, "kind": 0, "sender": 0, "bucket": 0, "epoch": 0, "group": 0, "operation": 0,
        "signature": 0, "length": 0, "step": 0, "offset": 0, "total": 0,
    } | fields  # fmt: skip
    data = struct.pack("!2sBBHHIIQIIIQQ", *values.values())
    return data + struct.pack("!I", zlib.crc32(data))


@given(headers())
def test_every_header_survives_the_trip(header):
    data = encode_header(header)
    assert len(data) == HEADER_BYTES
    assert decoded(data) == header


@given(headers(), st.data())
def test_headers_that_differ_look_different(header, data):
    other = data.draw(headers())
    assert (encode_header(header) == encode_header(other)) == (header == other)


def test_every_single_bit_that_flips_is_noticed():
    data = encode_header(SAMPLE)
    taken = []
    for bit in range(8 * HEADER_BYTES):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with suppress(RemoteProtocolError):
            taken.append((bit, decoded(bytes(damaged))))
    assert taken == []


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_noise_is_no_header(data):
    with pytest.raises(RemoteProtocolError, match="mini"):
        decoded(data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (forged(magic=b"GE"), "does not speak hcsim"),
        (forged(version=2), "version 2"),
        (forged(kind=99), "unknown kind 99"),
        (forged(length=101), "101 bytes where at most 100"),
        (forged(length=50, offset=60, total=100), "ends at byte 110 of a message of 100"),
        (forged(length=1, offset=2**64 - 1, total=2**64 - 1), "ends at byte"),
    ],
)
def test_an_impossible_header_is_refused_and_says_why(data, says):
    with pytest.raises(RemoteProtocolError, match=says):
        decoded(data, max_length=100)


def test_the_forger_of_these_tests_makes_headers_that_are_taken():
    assert decoded(forged(length=100, sender=3), max_length=100) == Header(100, sender=3)


@pytest.mark.parametrize(
    "header", [Header(-1), Header(2**32), Header(0, sender=2**16), Header(0, bucket=-1), Header(0, offset=2**64)]
)
def test_what_does_not_fit_is_not_sent(header):
    with pytest.raises(UsageError, match="cannot be encoded"):
        encode_header(header)
