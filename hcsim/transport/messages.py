"""Typed messages: what all control traffic is made of.

A protocol is a union of msgspec structs, its `Schema`. A message travels as one CONTROL frame of msgpack over a
channel, or behind its length over a socket pair between processes of one machine. Bytes that the schema does not accept
are the peer's fault.

What needs a reply is a request. Where one end asks one thing at a time, `Schema.ask` sends the request and returns the
next message. Where requests overlap they are numbered, and `Requests` keeps those that have no reply yet; the numbers
of one end never repeat, so that a late reply is told from one to a request that was never made.

Errors travel as data, the name of their class and their text (`describe`), and are built anew at the other end from a
table of classes (`revive`): no traceback, and nothing of the sender's classes.
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
        """`messages` is a struct or a union of structs; `complaint` is what is said of a peer that sends others."""
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)
        self._complaint = complaint

    def encode(self, message: M) -> bytes:
        """The message's bytes."""
        return msgspec.msgpack.encode(message)

    def decode(self, data: bytes | memoryview, peer: str) -> M:
        """The message in the bytes from `peer`, checked."""
        return decode_message(self._decoder, data, peer, self._complaint)

    def frame(self, message: M) -> tuple[Header, memoryview]:
        """The frame that carries the message."""
        data = self.encode(message)
        return Header(len(data), Kind.CONTROL), memoryview(data)

    def framed(self, header: Header, payload: Payload, peer: str) -> M:
        """The message that a frame from `peer` carries."""
        if header.kind is not Kind.CONTROL or isinstance(payload, Phantom):
            raise RemoteProtocolError(f"{peer} sent {header.kind.name} where a message was due", peer)
        return self.decode(payload, peer)

    async def send(self, channel: Channel, message: M) -> None:
        """Send one message."""
        await channel.send(*self.frame(message))

    async def recv(self, channel: Channel) -> M:
        """Receive the next message."""
        header, payload = await channel.recv(_allocated)
        return self.framed(header, payload, channel.peer)

    async def ask(self, channel: Channel, request: M) -> M:
        """Send a request and receive its reply, on a channel on which one end asks one thing at a time."""
        await self.send(channel, request)
        return await self.recv(channel)


def expect(message: object, kind: type[K], peer: str) -> K:
    """The message, if it is of the kind that is due."""
    if not isinstance(message, kind):
        said, due = type(message).__name__.lower(), kind.__name__.lower()
        raise RemoteProtocolError(f"{peer} sent the message {said!r} where {due!r} was due", peer)
    return message


def _allocated(header: Header) -> None:
    """As a `Place`: the channel allocates room for the payload."""


class Requests(Generic[W]):
    """The requests of one end that have no reply yet, by number, each with what waits for the reply."""

    def __init__(self) -> None:
        self.last = 0
        """The number of the latest request."""
        self._waiting: dict[int, W] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def number(self) -> int:
        """A number for the next request."""
        self.last += 1
        return self.last

    def add(self, number: int, waiting: W) -> None:
        """A request of that number has no reply yet."""
        self._waiting[number] = waiting

    def made(self, number: int) -> bool:
        """Whether there has been such a request."""
        return 0 < number <= self.last

    def get(self, number: int) -> W | None:
        """What waits for the reply to that request; None: nothing does any more."""
        return self._waiting.get(number)

    def take(self, number: int) -> W | None:
        """The same; from now on nothing waits."""
        return self._waiting.pop(number, None)

    def waiting(self) -> tuple[W, ...]:
        """All that wait, in the order of their requests: at the end of a connection each is to fail."""
        return tuple(self._waiting.values())


MAX_TEXT = 4096
MAX_KIND = 128


def describe(error: BaseException) -> tuple[str, str]:
    """The kind and the text of an error, for the peer."""
    try:
        text = str(error)
    except Exception:
        text = "an error that cannot say what it is"
    return _sendable(type(error).__name__[:MAX_KIND]), _sendable(text[:MAX_TEXT])


def _sendable(text: str) -> str:
    """A file's name may have bytes in it that are no text."""
    return text.encode("utf-8", "backslashreplace").decode()


def revive(kind: str, text: str, table: Mapping[str, type[HcsimError]]) -> HcsimError | None:
    """The error that a peer has described; None where its kind is not in the table."""
    known = table.get(kind)
    return None if known is None else known(text)
