"""The messages between the two ends of a channel.

Each end numbers its calls from 1. A message is a CONTROL frame of msgpack. The arrays of a call or a result
follow as DATA frames, in pieces, which may be interleaved with other messages:

    operation  the number of the call        bucket  which of its arrays
    step       0 of a call, 1 of a result    offset, total  of the piece within its array

Errors of a fixed table arrive as themselves, all others as a `RemoteError`. Errors of channels are not in the
table, since they would be mistaken for errors of the channel of the call.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from hcsim.errors import (
    CallRefused,
    CollectiveError,
    CollectiveTimeout,
    ConfigError,
    DeadlineExceeded,
    HcsimError,
    UsageError,
    WorkerLost,
)
from hcsim.transport.messages import MAX_KIND, Schema

Number = Annotated[int, Meta(ge=1, lt=1 << 62)]
Size = Annotated[int, Meta(ge=0, lt=1 << 48)]

OF_CALL, OF_RESULT = 0, 1
OVERHEAD_BYTES = 64 * 1024
"""The bytes of a message beside its body: names, and the shapes of its arrays."""
MAX_DEPTH = 32
"""The limit on nested calls, which ends cycles."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on the resources that calls over one channel may use, in each direction."""

    max_calls: int = 64
    """Concurrent calls in each direction; further ones wait. Nested calls do not wait, since two ends could deadlock;
    see `max_served`."""
    max_body_bytes: int = 1 << 20
    """The size of arguments or a result without arrays."""
    max_arrays: int = 256
    """The number of arrays in one message."""
    max_array_bytes: int = 1 << 30
    """The size of all arrays in one message."""
    max_held_bytes: int = 1 << 31
    """The size of all arrays that are being received, and of all results that wait to be sent."""
    max_refs: int = 4096
    """The number of values that are lent to the peer at once."""
    segment_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        low = [name for name in self.__struct_fields__ if getattr(self, name) < 1]
        if low:
            raise UsageError(f"limits are at least 1: {', '.join(low)}")

    @property
    def max_served(self) -> int:
        """The number of the peer's calls that are served at once, including nested ones."""
        return 4 * max(self.max_calls, MAX_DEPTH)

    @property
    def max_unread(self) -> int:
        """The number of unsent answers beyond which the peer must not call. A peer that waits for answers never gets
        near
        it."""
        return 16 * self.max_served

    @property
    def max_frame_bytes(self) -> int:
        """The size of the largest frame from a peer with these limits."""
        return max(self.segment_bytes, self.max_body_bytes + OVERHEAD_BYTES)


class ArraySpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The type and shape of an array that follows."""

    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Size, ...], Meta(max_length=32)]


class ReferenceSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value that stays with the sender: its number and its type name."""

    number: Number
    kind: Annotated[str, Meta(max_length=128)]


class EncodedValue(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Arguments or a result: msgpack, in which arrays and references are numbers."""

    body: bytes
    arrays: tuple[ArraySpec, ...] = ()
    loans: tuple[ReferenceSpec, ...] = ()
    """The sender's values that it refers to."""
    back: tuple[Number, ...] = ()
    """The receiver's values that it refers to; they must not be released before the body is decoded."""


class CallRequest(msgspec.Struct, frozen=True, tag="call"):
    """A call of a function."""

    number: Number
    name: Annotated[str, Meta(max_length=256)]
    parcel: EncodedValue
    deadline_s: Annotated[float, Meta(gt=0)] | None = None
    """How long the work may take from now on. It is a duration, since clocks differ."""
    depth: Annotated[int, Meta(ge=0)] = 0
    """The number of enclosing calls that wait for this one."""


class CallResult(msgspec.Struct, frozen=True, tag="result"):
    """The return value of a call."""

    number: Number
    parcel: EncodedValue


class CallFailure(msgspec.Struct, frozen=True, tag="failure"):
    """The error or the refusal of a call."""

    number: Number
    kind: Annotated[str, Meta(max_length=MAX_KIND)]
    text: str


class CancelCall(msgspec.Struct, frozen=True, tag="cancel"):
    """The caller has given up waiting for the answer."""

    number: Number


class ReleaseReference(msgspec.Struct, frozen=True, tag="release"):
    """The sender has dropped a reference that was sent to it `times` times."""

    number: Number
    times: Number


RpcMessage: TypeAlias = CallRequest | CallResult | CallFailure | CancelCall | ReleaseReference
SCHEMA: Schema[RpcMessage] = Schema(RpcMessage)

OUR_ERRORS: dict[str, type[HcsimError]] = {
    error.__name__: error
    for error in (
        HcsimError, ConfigError, UsageError, CallRefused, DeadlineExceeded, CollectiveError, CollectiveTimeout,
        WorkerLost,
    )
}  # fmt: skip
"""The errors that are sent by class name with any registry."""
