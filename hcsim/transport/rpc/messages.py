"""What the two ends of a channel say to each other.

Each end numbers its calls from 1. A message is a CONTROL frame of msgpack; the arrays of a call or a result follow
as DATA frames, in pieces, between which other messages may come:

    operation  the number of the call        bucket  which of its arrays
    step       0 of a call, 1 of a result    offset, total  of the piece within its array

Errors of a closed table arrive as themselves, all others as a `RemoteError`. Errors about channels are not in the
table, since they would be taken for errors of this one.
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
"""Of a message beside its body: names, and the shapes of its arrays."""
MAX_DEPTH = 32
"""Calls within calls within calls: a cycle that never ends is found here."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one peer may ask of us, and we of it."""

    max_calls: int = 64
    """Under way at once in each direction; further ones wait for their turn. Calls that are made to answer a call
    do not wait, or two ends could wait for each other; see `max_served`."""
    max_body_bytes: int = 1 << 20
    """Arguments or a result without their arrays."""
    max_arrays: int = 256
    """In one message."""
    max_array_bytes: int = 1 << 30
    """Of all arrays in one message."""
    max_held_bytes: int = 1 << 31
    """Of all arrays that are being received, and of all results that wait to be sent."""
    max_refs: int = 4096
    """Values that are lent to the peer at once."""
    segment_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        low = [name for name in self.__struct_fields__ if getattr(self, name) < 1]
        if low:
            raise UsageError(f"limits are at least 1: {', '.join(low)}")

    @property
    def max_served(self) -> int:
        """Calls of the peer that are answered at once, with those that are made to answer a call of ours."""
        return 4 * max(self.max_calls, MAX_DEPTH)

    @property
    def max_unread(self) -> int:
        """Answers for the peer that wait to be sent, beyond which it must not call. Who waits for them is never near
        that."""
        return 16 * self.max_served

    @property
    def max_frame_bytes(self) -> int:
        """The largest frame that a peer with these limits sends."""
        return max(self.segment_bytes, self.max_body_bytes + OVERHEAD_BYTES)


class ArraySpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An array that follows."""

    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Size, ...], Meta(max_length=32)]


class Loan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value that stays with the sender: its number there, and what kind it is."""

    number: Number
    kind: Annotated[str, Meta(max_length=128)]


class Parcel(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Arguments or a result: msgpack, in which arrays and references are numbers."""

    body: bytes
    arrays: tuple[ArraySpec, ...] = ()
    loans: tuple[Loan, ...] = ()
    """Values of the sender's that it refers to."""
    back: tuple[Number, ...] = ()
    """Values of the receiver's that it refers to: they must not be released before the body is read."""


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Please call this function."""

    number: Number
    name: Annotated[str, Meta(max_length=256)]
    parcel: Parcel
    deadline_s: Annotated[float, Meta(gt=0)] | None = None
    """How long the work may take from now on: clocks do not agree, durations do."""
    depth: Annotated[int, Meta(ge=0)] = 0
    """How many calls are waiting for this one's answer in order to answer theirs."""


class Result(msgspec.Struct, frozen=True, tag="result"):
    """What it returned."""

    number: Number
    parcel: Parcel


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """It failed, or was refused."""

    number: Number
    kind: Annotated[str, Meta(max_length=MAX_KIND)]
    text: str


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody waits for the answer to this call any more."""

    number: Number


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The sender has dropped a value that was lent to it so many times."""

    number: Number
    times: Number


Message: TypeAlias = Call | Result | Failure | Cancel | Release
SCHEMA: Schema[Message] = Schema(Message)

OUR_ERRORS: dict[str, type[HcsimError]] = {
    error.__name__: error
    for error in (
        HcsimError, ConfigError, UsageError, CallRefused, DeadlineExceeded, CollectiveError, CollectiveTimeout,
        WorkerLost,
    )
}  # fmt: skip
"""Those that travel as themselves, whatever a registry adds."""
