"""Typed messages, used by all control traffic.

A protocol is a `Schema`: a union of msgspec structs. A message is sent as one CONTROL frame of msgpack over a
channel, or with a length prefix over a socket pair between processes of one machine. Bytes that the schema
rejects are the peer's error.

A message that needs a reply is a request. With one outstanding request at a time, `Schema.ask` sends it and
returns the next message. Overlapping requests are numbered, and `Requests` keeps those without a reply. The
numbers of one end never repeat, so a late reply can be told from a reply to a request that was never made.

Errors are sent as the name of their class and their text (`describe`), and recreated at the other end from a
table of classes (`revive`). Tracebacks and classes of the sender are not sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec

from hcsim.errors import HcsimError, RemoteProtocolError
from hcsim.runtime.channel import Channel, Payload, Phantom
from hcsim.runtime.frame import Header, Kind, decode_message

M = TypeVar("M")
K = TypeVar("K")
W = TypeVar("W")


class Schema(Generic[M]):
    """The messages of one protocol."""

    def __init__(self, messages: Any, complaint: str = "sent a message that cannot be read") -> None:
        """`messages` is a struct or a union of structs; `complaint` is the error text for a peer that sends other
        messages."""
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)
        self._complaint = complaint

    def encode(self, message: M) -> bytes:
        return msgspec.msgpack.encode(message)

    def decode(self, data: bytes | memoryview, peer: str) -> M:
        """Decode and validate a message from `peer`."""
        return decode_message(self._decoder, data, peer, self._complaint)

    def frame(self, message: M) -> tuple[Header, memoryview]:
        """Return the frame of a message."""
        data = self.encode(message)
        return Header(len(data), Kind.CONTROL), memoryview(data)

    def framed(self, header: Header, payload: Payload, peer: str) -> M:
        """Decode the message in a frame from `peer`."""
        if header.kind is not Kind.CONTROL or isinstance(payload, Phantom):
            raise RemoteProtocolError(f"{peer} sent {header.kind.name} where a message was due", peer)
        return self.decode(payload, peer)

    async def send(self, channel: Channel, message: M) -> None:
        await channel.send(*self.frame(message))

    async def recv(self, channel: Channel) -> M:
        header, payload = await channel.recv(_allocated)
        return self.framed(header, payload, channel.peer)

    async def ask(self, channel: Channel, request: M) -> M:
        """Send a request and receive its reply, on a channel with one outstanding request at a time."""
        await self.send(channel, request)
        return await self.recv(channel)


def expect(message: object, kind: type[K], peer: str) -> K:
    """Return the message. Raises `RemoteProtocolError` if it is not of the expected kind."""
    if not isinstance(message, kind):
        said, due = _name(type(message)), _name(kind)
        raise RemoteProtocolError(f"{peer} sent the message {said!r} where {due!r} was due", peer)
    return message


def _name(kind: type[object]) -> str:
    """Return the name of a kind of message on the wire."""
    tag = getattr(getattr(kind, "__struct_config__", None), "tag", None)
    return str(tag or kind.__name__).lower()


def _allocated(header: Header) -> None:
    """A `Place` that lets the channel allocate the payload's buffer."""


class Requests(Generic[W]):
    """The numbered requests of one end without a reply, each with a value for the reply, such as a future."""

    def __init__(self) -> None:
        self.last = 0
        """The number of the latest request."""
        self._waiting: dict[int, W] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def number(self) -> int:
        """Return a number for the next request."""
        self.last += 1
        return self.last

    def add(self, number: int, waiting: W) -> None:
        """Add a request that waits for its reply."""
        self._waiting[number] = waiting

    def made(self, number: int) -> bool:
        """Return whether there has been a request of that number."""
        return 0 < number <= self.last

    def get(self, number: int) -> W | None:
        """Return the value of a request that waits for its reply, or None."""
        return self._waiting.get(number)

    def take(self, number: int) -> W | None:
        """Remove a request and return its value, or None."""
        return self._waiting.pop(number, None)

    def waiting(self) -> tuple[W, ...]:
        """Return the values of all waiting requests, in order, for example to fail them at the end of a connection."""
        return tuple(self._waiting.values())


MAX_TEXT = 4096
MAX_KIND = 128


def describe(error: BaseException) -> tuple[str, str]:
    """Return the class name and the text of an error, for the peer."""
    try:
        text = str(error)
    except Exception:
        text = "an error that cannot say what it is"
    return _sendable(type(error).__name__[:MAX_KIND]), _sendable(text[:MAX_TEXT])


def _sendable(text: str) -> str:
    """Escape surrogates, which file names may contain."""
    return text.encode("utf-8", "backslashreplace").decode()


def revive(kind: str, text: str, table: Mapping[str, type[HcsimError]]) -> HcsimError | None:
    """Return the error described by a peer; None if its class is not in the table."""
    known = table.get(kind)
    return None if known is None else known(text)
