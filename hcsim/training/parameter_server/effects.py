"""What the state machine wants done."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from hcsim.training.parameter_server.messages import Answer


class Tell(msgspec.Struct, frozen=True):
    """Answer a worker, if it is connected."""

    worker: str
    answer: Answer


class Give(msgspec.Struct, frozen=True):
    """Answer a worker with the model; with its version alone if it has that already."""

    worker: str
    version: int
    known: bool


class Contribution(msgspec.Struct, frozen=True):
    """A valid push that is to count."""

    worker: str
    sequence: int
    samples: int
    gradient: Any


class Apply(msgspec.Struct, frozen=True):
    """Make the next version from the mean of these gradients, weighted by samples."""

    contributions: tuple[Contribution, ...]
    """In the order in which they are summed."""
    share: float
    """Of the learning rate."""


Effect: TypeAlias = Tell | Give | Apply
