"""What the coordinator's state machines want done."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from hcsim.cluster.coordinator.messages import Notice
from hcsim.errors import HcsimError


class Answer(msgspec.Struct, frozen=True):
    """End a question that waits, with a value or an error."""

    question: int
    value: Any = None
    error: HcsimError | None = None


class Tell(msgspec.Struct, frozen=True):
    """Let a worker know how its generation stands."""

    worker: str
    notice: Notice


class Keep(msgspec.Struct, frozen=True):
    """Write down what must outlive a restart, before anything else is done."""


class Note(msgspec.Struct, frozen=True):
    """For people."""

    text: str


Effect: TypeAlias = Answer | Tell | Keep | Note
