"""How far a member has come, and in whose company: what members tell each other when a view begins.

An *era* is what happens in one view. A member is in the era that it last synchronised in. Eras follow each other in
one line (their order is: generation, epoch), and everybody remembers with which step each began. So it can be
told of a member that was away whether the steps that it took part in count.

A cluster of which nothing is left but checkpoints begins a new lineage, and its epochs from the start: those
eras are of the next generation.

All eras that go back to the same first one are of one *origin*. Members of one origin compare their eras. A cluster
that began without any checkpoint is of another origin than one that was there before, and their eras say nothing about
each other. So between origins this decides, in this order:

    1.  An origin that some member works on now, with steps that it holds in memory, goes before one that members have
        from a checkpoint alone. A machine that returns with an old checkpoint takes over the state of the cluster that
        works now, however many eras or steps it remembers.
    2.  Of two that members work on now, the one whose member is the most senior of the view: its cluster took in the
        other's members (see `View.standing`: the larger one does).
    3.  Of two that nobody works on, the one with more steps.

Where any side may go on, or a machine alone, members of one origin may have gone apart, each with a lineage of views
(`hcsim.cluster.view`). Where they meet, they go on from what those hold who worked in the lineage of the present view:
they took in the others, who start over from there, however many steps they have done.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from hcsim.cluster.view import View

ERAS_KEPT = 256
"""A member that was away for longer than so many is treated like one that was never there."""
_ORIGINS = 0x7FFFFFFF
_CRC_BITS = 32


class Era(msgspec.Struct, frozen=True, order=True):
    """A view that a model was trained in."""

    generation: int = 0
    epoch: int = -1
    view: int = 0
    """A digest of its members: where both sides of a split cluster may go on, they are of unlike eras."""
    lineage: int = 0
    origin: int = 0
    """Which first era it goes back to."""

    def next(self, view: View) -> Era:
        """The era of a view whose members go on from here."""
        lineage = lineage_digest(view)
        members = zlib.crc32(repr([(member.node, member.boot) for member in view.members]).encode())
        generation = self.generation + (self.epoch >= 0 and lineage != self.lineage)
        first = zlib.crc32(f"{view.lineage} {view.epoch}".encode()) & _ORIGINS
        return Era(generation, view.epoch, members, lineage, self.origin if self.epoch >= 0 else first)


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


class Provenance(msgspec.Struct, frozen=True):
    """How far a model has come: what goes with it, beside its arrays."""

    era: Era
    past: Past
    step: int
    since: tuple[int, int]
    """A step, and how many samples were dealt out before it: where the next batches begin."""
    sizes: dict[str, int]
    """Batch sizes by node, where each has its own."""
    memory: bool
    """Whether what compressors remember goes with it; that may be nothing."""

    def next(self, view: View, step: int, since: tuple[int, int], sizes: dict[str, int]) -> Provenance:
        """In a view whose members go on from here, which is after that step."""
        era = self.era.next(view)
        return Provenance(era, self.past.after(era, step), step, since, sizes, memory=False)


NOTHING_YET = Provenance(Era(), Past(), 0, (0, 0), {}, memory=False)


class Header(NamedTuple):
    """What members tell each other first. `most_right` says whose state they go on from."""

    generation: int
    epoch: int
    view: int
    lineage: int
    step: int
    pending: int
    """The step of an update that was exchanged and may count; or -1."""
    intent: int
    """A digest of the settings."""
    origin: int
    live: bool
    """Whether it has taken steps that it did not load from a checkpoint."""

    @classmethod
    def of(cls, era: Era, step: int, pending: int, intent: bytes, *, live: bool) -> Header:
        """What one says who holds this, and wants that."""
        return cls(
            era.generation, era.epoch, era.view, era.lineage, step, pending, intent_digest(intent), era.origin, live
        )

    @property
    def era(self) -> Era:
        """The era that it last synchronised in."""
        return Era(self.generation, self.epoch, self.view, self.lineage, self.origin)

    @property
    def standing(self) -> tuple[Era, int]:
        """For comparing."""
        return self.era, self.step

    def numbers(self) -> list[int]:
        """For the wire: checksums have half of a number each."""
        view, lineage = self.view | self.live << _CRC_BITS, self.lineage | self.origin << _CRC_BITS
        return [self.generation, self.epoch, view, lineage, self.step, self.pending, self.intent]

    @classmethod
    def read(cls, array: npt.NDArray[np.int64]) -> Header:
        """From what was gathered."""
        generation, epoch, view, lineage, step, pending, intent = (int(number) for number in array)
        low = (1 << _CRC_BITS) - 1
        origin, live = lineage >> _CRC_BITS, bool(view >> _CRC_BITS)
        return cls(generation, epoch, view & low, lineage & low, step, pending, intent, origin, live)


def intent_digest(intent: bytes) -> int:
    """Settings in one number."""
    return int.from_bytes(hashlib.sha256(intent).digest()[:8], "big") >> 1


def lineage_digest(view: View) -> int:
    """Which lineage a view is of, as a number."""
    return zlib.crc32(view.lineage.encode())


def most_right(headers: Sequence[Header], lineage: int) -> int:
    """The rank whose state all go on from in a view of that lineage; of several that hold the same, the first."""
    held = [(rank, header) for rank, header in enumerate(headers) if header.epoch >= 0]

    def worth(origin: int) -> tuple[bool, int]:
        alike = [(rank, header) for rank, header in held if header.origin == origin]
        live = [rank for rank, header in alike if header.live]
        return (True, -live[0]) if live else (False, max(header.step for _, header in alike))

    def key(rank: int) -> tuple[tuple[bool, int], bool, tuple[Era, int], int]:
        header = headers[rank]
        value = worth(header.origin) if header.epoch >= 0 else (False, -1)
        return value, header.lineage == lineage, header.standing, -rank

    return max(range(len(headers)), key=key)
