"""What workers and the server say to each other.

A worker joins, then asks one thing at a time: for the model (`Pull`), to count a gradient (`Push`), to be told when
all is over (`Await`). The server answers each, later where it has to, and says `Wait` meanwhile. `Done` may come
at any time; it is the answer to an `Await` alone, unless it names an error. Pushes of a worker are
numbered; the number makes a repeated one known, so that whatever is lost on the way can be sent again and
counts once.

A message is a CONTROL frame of msgpack. `Push` and `Model` announce `size_bytes` that follow as DATA frames.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from hcsim.runtime.frame import decode_message

Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
Text = Annotated[str, Meta(max_length=256)]

UNKNOWN = -1
"""The version of a model that nobody has vouched for."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """The first message on a connection: who is calling."""

    job: Text
    worker: Annotated[str, Meta(min_length=1, max_length=256)]
    life: Number
    """Drawn when the worker starts: tells one that calls again from one that starts again under its name."""
    model: Text
    """A digest of names and shapes: gradients of another model are of no use."""
    contributes: bool = True
    """Whether it will push; otherwise it only wants to know the end."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The worker is known from now on."""

    sequence: Number
    """Of its last push that was answered."""
    accepted: Number
    """How many of its pushes have counted."""
    history: Number = 0
    """Drawn when the server starts: versions of another history are other models."""


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Asks for the model, if it is not this version."""

    version: Annotated[int, Meta(ge=UNKNOWN)]


class Model(msgspec.Struct, frozen=True, tag="model"):
    """The model: so many bytes of float32, or none when the worker has it."""

    version: Number
    size_bytes: Number


class Push(msgspec.Struct, frozen=True, tag="push"):
    """A gradient: the mean over `samples`, computed from that version, as one payload per tensor."""

    sequence: Annotated[int, Meta(ge=1, lt=1 << 62)]
    version: Number
    samples: Annotated[int, Meta(ge=0, lt=1 << 40)]
    compressor: Text
    sizes: tuple[Number, ...]

    @property
    def size_bytes(self) -> int:
        """Of all payloads."""
        return sum(self.sizes)


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The push has counted, in the update that made this version."""

    sequence: Number
    version: Number


class Stale(msgspec.Struct, frozen=True, tag="stale"):
    """The push does not count: it is of another version than is wanted now. Pull and compute again."""

    sequence: Number
    version: Number


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The push (or, with sequence 0, the joining) is not valid."""

    sequence: Number
    reason: str


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """We are here, and there is no answer yet."""


class Await(msgspec.Struct, frozen=True, tag="await"):
    """Asks to be told when training is over."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Training is over, with this version; or, where an error is named, it has failed."""

    version: Number
    error: str = ""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The worker will push no more. After the end: it has what it wanted."""

    why: Text = ""


Question: TypeAlias = Join | Pull | Push | Await | Leave
Answer: TypeAlias = Welcome | Model | Accepted | Stale | Refused | Wait | Done
Verdict: TypeAlias = Accepted | Stale | Refused
"""What became of a push: it is given once, and repeated if asked again."""

_Message = TypeVar("_Message", Question, Answer)
_QUESTIONS: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Question | Answer) -> bytes:
    """The message's bytes on the wire."""
    return msgspec.msgpack.encode(message)


def question(data: bytes | memoryview, peer: str) -> Question:
    """What a worker asks."""
    return decode_message(_QUESTIONS, data, peer)


def answer(data: bytes | memoryview, peer: str) -> Answer:
    """What the server answers."""
    return decode_message(_ANSWERS, data, peer)
