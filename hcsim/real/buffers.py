"""What every real channel does with what it is given: bytes to send, a place to receive into, an error to repeat."""

from __future__ import annotations

from hcsim.errors import ChannelError, UsageError
from hcsim.runtime.channel import Fold, Payload, Phantom
from hcsim.runtime.frame import Header

FIRST_MAX_FRAME_BYTES = 64 * 1024
"""What a peer may send before somebody raises the limit: enough to say hello."""


def bytes_of(header: Header, payload: Payload) -> memoryview:
    """What is to be sent, if it is what the header announces."""
    if isinstance(payload, Phantom):
        raise UsageError("a phantom has no bytes, so it cannot cross a real network")
    if len(payload) != header.length:
        raise UsageError(f"the header announces {header.length} bytes, the payload has {len(payload)}")
    return payload


def room_for(header: Header, where: memoryview | Fold | None) -> memoryview:
    """What is received goes there as it is; nothing is added to anything."""
    view = where.room if isinstance(where, Fold) else where
    if view is None:
        return memoryview(bytearray(header.length))
    if len(view) != header.length or view.readonly:
        kind = "read-only" if view.readonly else "writable"
        raise UsageError(f"a frame of {header.length} bytes does not fit a {kind} buffer of {len(view)}")
    return view


def fresh(error: ChannelError) -> ChannelError:
    """A copy: one exception object raised in several tasks would mix their tracebacks."""
    return type(error)(str(error), error.peer)
