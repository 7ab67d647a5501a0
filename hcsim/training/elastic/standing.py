"""How far a member has come, and in whose company: what members tell each other when a view begins.

An *era* is what happens in one view. A member is in the era that it last synchronised in. Eras follow each other in
one line (their order is: generation, epoch), and everybody remembers with which step each began. So it can be
told of a member that was away whether the steps that it took part in count.

A cluster of which nothing is left but checkpoints begins a new lineage, and its epochs from the start: those
eras are of the next generation.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from hcsim.cluster.view import View

ERAS_KEPT = 256
"""A member that was away for longer than so many is treated like one that was never there."""


class Era(msgspec.Struct, frozen=True, order=True):
    """A view that a model was trained in."""

    generation: int = 0
    epoch: int = -1
    view: int = 0
    """A digest of its members: where both sides of a split cluster may go on, they are of unlike eras."""
    lineage: int = 0

    def next(self, view: View) -> Era:
        """The era of a view whose members go on from here."""
        lineage = zlib.crc32(view.lineage.encode())
        members = zlib.crc32(repr([(member.node, member.boot) for member in view.members]).encode())
        generation = self.generation + (self.epoch >= 0 and lineage != self.lineage)
        return Era(generation, view.epoch, members, lineage)


class Began(msgspec.Struct, frozen=True):
    """An era, and the step that it began with."""

    era: Era
    step: int


class Past(msgspec.Struct, frozen=True):
    """The eras that led to a model."""

    eras: tuple[Began, ...] = ()

    def after(self, era: Era, step: int) -> Past:
        """With one more, from this step on."""
        return Past((*self.eras, Began(era, step))[-ERAS_KEPT:])

    def counted(self, era: Era, now: int) -> int | None:
        """How many steps had been taken when that era ended; `now` if it has not. None: that era does not count."""
        ends = [*(began.step for began in self.eras[1:]), now]
        return next((end for began, end in zip(self.eras, ends, strict=False) if began.era == era), None)


class Header(NamedTuple):
    """What members tell each other first. Whoever has the greatest era and, in it, the most steps, is right."""

    generation: int
    epoch: int
    view: int
    lineage: int
    step: int
    pending: int
    """The step of an update that was exchanged and may count; or -1."""
    intent: int
    """A digest of the settings."""

    @classmethod
    def of(cls, era: Era, step: int, pending: int, intent: bytes) -> Header:
        """What one says who holds this, and wants that."""
        digest = int.from_bytes(hashlib.sha256(intent).digest()[:8], "big") >> 1
        return cls(era.generation, era.epoch, era.view, era.lineage, step, pending, digest)

    @property
    def era(self) -> Era:
        """The era that it last synchronised in."""
        return Era(self.generation, self.epoch, self.view, self.lineage)

    @property
    def standing(self) -> tuple[Era, int]:
        """For comparing."""
        return self.era, self.step

    @classmethod
    def read(cls, array: npt.NDArray[np.int64]) -> Header:
        """From what was gathered."""
        return cls(*(int(number) for number in array))
