"""The header of every frame, in both worlds.

    offset  0  2  magic "hc"           24  4  signature  of the sender's operation
            2  1  version              28  4  length     bytes of payload behind this header
            3  1  kind                 32  4  step       round of the plan
            4  2  sender (rank)        36  8  offset     of this segment within its message
            6  2  bucket (or tag)      44  8  total      bytes of the whole message
            8  4  epoch                52  4  crc32 of the 52 bytes before it
           12  4  group
           16  8  operation

All numbers are big-endian. (epoch, group, operation, bucket, step, sender) identify a frame's message, so two
operations in flight never receive each other's bytes. A tag has 32 bits: the lower half is in `bucket`, the
upper half in the upper 16 bits of `operation`. Large messages are split into frames with rising `offset`.
`signature` is a digest of the operation, its dtype, length and algorithm: ranks that disagree detect it at the
first frame. An ABORT's `step` is the rank at fault, plus one.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import TypeVar

import msgspec

from hcsim.errors import UNDECODABLE, RemoteProtocolError, UsageError

MAGIC = b"hc"
VERSION = 1
_FIELDS = struct.Struct("!2sBBHHIIQIIIQQ")
_CRC = struct.Struct("!I")
_ALL = struct.Struct(f"{_FIELDS.format}{_CRC.format[1:]}")
HEADER_BYTES = _ALL.size
_M = TypeVar("_M")


class Kind(IntEnum):
    """The purpose of a frame."""

    DATA = 0
    """A segment of a tensor."""
    HELLO = 1
    """The caller's identity and group; the first frame in each direction."""
    ABORT = 2
    """The sender aborted an operation; the payload is the reason."""
    BYE = 3
    """The sender leaves gracefully and will send nothing more."""
    CONTROL = 4
    """A typed message of a component above the collectives."""
    LATER = 5
    """The answer to a hello that came too early: the caller should try again."""
    WAITING = 6
    """The sender has been waiting in the header's operation for a while; there is no payload."""
    COMPUTING = 7
    """A rank computes and will come to its next operation; there is no payload. `step` is the rank, plus one, and
    `operation` the number of its notice: others pass it on."""
    CLOCK = 8
    """A question for the time, or the answer, for timelines of several machines (see `transport.clock_questions`)."""


_KINDS = tuple(Kind)


class Header(msgspec.Struct, frozen=True, gc=False):
    """One frame's header; see the module docstring for its encoding."""

    length: int
    kind: Kind = Kind.DATA
    sender: int = 0
    bucket: int = 0
    epoch: int = 0
    group: int = 0
    operation: int = 0
    signature: int = 0
    step: int = 0
    offset: int = 0
    total: int = 0


def encode_header(header: Header) -> bytes:
    h = header
    try:
        fields = _FIELDS.pack(
            MAGIC, VERSION, h.kind, h.sender, h.bucket, h.epoch, h.group, h.operation,
            h.signature, h.length, h.step, h.offset, h.total,
        )  # fmt: skip
    except struct.error as error:
        raise UsageError(f"{header} cannot be encoded: {error}") from None
    return fields + _CRC.pack(zlib.crc32(fields))


def decode_header(data: bytes | bytearray | memoryview, *, max_length: int, peer: str) -> Header:
    """Decode and check `HEADER_BYTES` bytes from `peer`; the payload may have at most `max_length` bytes."""
    (magic, version, kind, sender, bucket, epoch, group, operation,
     signature, length, step, offset, total, crc) = _ALL.unpack(data)  # fmt: skip
    if magic != MAGIC:
        raise RemoteProtocolError(f"{peer} does not speak hcsim: its frame starts with {magic!r}", peer)
    if version != VERSION:
        raise RemoteProtocolError(f"{peer} speaks version {version} of the protocol, we speak {VERSION}", peer)
    if crc != zlib.crc32(memoryview(data)[: _FIELDS.size]):
        raise RemoteProtocolError(f"a header from {peer} arrived damaged (its checksum does not match)", peer)
    if kind >= len(_KINDS):
        raise RemoteProtocolError(f"{peer} sent a frame of unknown kind {kind}", peer)
    if length > max_length:
        raise RemoteProtocolError(
            f"{peer} announced a frame of {length} bytes where at most {max_length} are allowed", peer
        )
    if total and offset + length > total:
        raise RemoteProtocolError(
            f"{peer} sent a segment that ends at byte {offset + length} of a message of {total}", peer
        )
    return Header(length, _KINDS[kind], sender, bucket, epoch, group, operation, signature, step, offset, total)


def decode_message(
    decoder: msgspec.msgpack.Decoder[_M],
    data: bytes | memoryview,
    peer: str,
    complaint: str = "sent a message that cannot be read",
) -> _M:
    """Decode and check the message in a payload; an invalid message is a protocol error."""
    try:
        return decoder.decode(data)
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"{peer} {complaint}: {error}", peer) from None
