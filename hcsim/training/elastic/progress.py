"""A member's progress, which members exchange when a view begins.

A *trained view* is a view in which a model was trained. A member is in the one that it last synchronised in.
Trained views are totally ordered by (generation, epoch), and every member records the step with which each began. So
the members can decide whether the steps of a member that was away count.

A cluster that restarts from checkpoints alone begins a new lineage, whose epochs start again: those views are of the
next generation.

All trained views that go back to the same first one have one *origin*. Members of one origin compare them. A
cluster that began without any checkpoint has another origin than an earlier one, and their views cannot be
compared. Between origins this decides, in this order:

    1.  An origin that some member works on now, with steps that it holds in memory, goes before one that
        members have from a checkpoint alone. A machine that returns with an old checkpoint takes over the
        state of the running cluster, however many trained views or steps its checkpoint has.
    2.  Of two that members work on now, the one whose member is the most senior of the view: its cluster took
        in the other's members (see `View.standing`: the larger one does).
    3.  Of two that no member works on, the one with more steps.

Where any side of a split, or a single machine, may go on, members of one origin may have diverged, each with
its own lineage of views (`hcsim.cluster.view`). When they meet, they go on from the state of the members of the
present view's lineage. The others start over from that state, however many steps they have done.
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

VIEWS_KEPT = 256
"""A member that was away for more trained views than this is treated as a new one."""
_ORIGINS = 0x7FFFFFFF
_CRC_BITS = 32


class TrainedView(msgspec.Struct, frozen=True, order=True):
    """A view in which a model was trained."""

    generation: int = 0
    epoch: int = -1
    view: int = 0
    """A digest of the view's members: where both sides of a split cluster may go on, their views differ by it."""
    lineage: int = 0
    origin: int = 0
    """The first trained view that it goes back to."""

    def next(self, view: View) -> TrainedView:
        """Return the trained view of a view whose members go on from here."""
        lineage = lineage_digest(view)
        members = zlib.crc32(repr([(member.node, member.boot) for member in view.members]).encode())
        generation = self.generation + (self.epoch >= 0 and lineage != self.lineage)
        first = zlib.crc32(f"{view.lineage} {view.epoch}".encode()) & _ORIGINS
        return TrainedView(generation, view.epoch, members, lineage, self.origin if self.epoch >= 0 else first)


class ViewBeginning(msgspec.Struct, frozen=True):
    """A trained view, and the step with which it began."""

    trained: TrainedView
    step: int


class ViewHistory(msgspec.Struct, frozen=True):
    """The trained views that led to a model."""

    views: tuple[ViewBeginning, ...] = ()

    def after(self, trained: TrainedView, step: int) -> ViewHistory:
        """Return the past extended by a trained view that begins with this step."""
        return ViewHistory((*self.views, ViewBeginning(trained, step))[-VIEWS_KEPT:])

    def counted(self, trained: TrainedView, now: int) -> int | None:
        """Return the number of steps taken when that view ended, or `now` if it has not ended. None: that view does not
        count."""
        ends = [*(began.step for began in self.views[1:]), now]
        return next((end for began, end in zip(self.views, ends, strict=False) if began.trained == trained), None)


class Provenance(msgspec.Struct, frozen=True):
    """The progress of a model: its state beside the arrays."""

    trained: TrainedView
    past: ViewHistory
    step: int
    since: tuple[int, int]
    """A step, and the number of samples dealt out before it: where the next batches begin."""
    sizes: dict[str, int]
    """Batch sizes by node, where each has its own."""
    memory: bool
    """Whether the compressors' state is included, even if it is empty."""

    def next(self, view: View, step: int, since: tuple[int, int], sizes: dict[str, int]) -> Provenance:
        """Return the provenance in a view whose members go on from here, after that step."""
        trained = self.trained.next(view)
        return Provenance(trained, self.past.after(trained, step), step, since, sizes, memory=False)


NOTHING_YET = Provenance(TrainedView(), ViewHistory(), 0, (0, 0), {}, memory=False)


class MemberProgress(NamedTuple):
    """The first message between members. `most_right` selects the rank whose state all go on from."""

    generation: int
    epoch: int
    view: int
    lineage: int
    step: int
    pending: int
    """The step of an update that was exchanged and may count, or -1."""
    intent: int
    """A digest of the settings."""
    origin: int
    live: bool
    """Whether it has taken steps that it did not load from a checkpoint."""

    @classmethod
    def of(cls, trained: TrainedView, step: int, pending: int, intent: bytes, *, live: bool) -> MemberProgress:
        return cls(
            trained.generation,
            trained.epoch,
            trained.view,
            trained.lineage,
            step,
            pending,
            intent_digest(intent),
            trained.origin,
            live,
        )

    @property
    def trained(self) -> TrainedView:
        """The trained view that the member last synchronised in."""
        return TrainedView(self.generation, self.epoch, self.view, self.lineage, self.origin)

    @property
    def standing(self) -> tuple[TrainedView, int]:
        """The sort key of the progress: the trained view and the step."""
        return self.trained, self.step

    def numbers(self) -> list[int]:
        """Encode the header for the wire; each checksum takes half of a number."""
        view, lineage = self.view | self.live << _CRC_BITS, self.lineage | self.origin << _CRC_BITS
        return [self.generation, self.epoch, view, lineage, self.step, self.pending, self.intent]

    @classmethod
    def read(cls, array: npt.NDArray[np.int64]) -> MemberProgress:
        generation, epoch, view, lineage, step, pending, intent = (int(number) for number in array)
        low = (1 << _CRC_BITS) - 1
        origin, live = lineage >> _CRC_BITS, bool(view >> _CRC_BITS)
        return cls(generation, epoch, view & low, lineage & low, step, pending, intent, origin, live)


def intent_digest(intent: bytes) -> int:
    return int.from_bytes(hashlib.sha256(intent).digest()[:8], "big") >> 1


def lineage_digest(view: View) -> int:
    return zlib.crc32(view.lineage.encode())


def most_right(headers: Sequence[MemberProgress], lineage: int) -> int:
    """Return the rank whose state all go on from in a view of that lineage; of several with the same state, the
    first."""
    held = [(rank, header) for rank, header in enumerate(headers) if header.epoch >= 0]

    def worth(origin: int) -> tuple[bool, int]:
        alike = [(rank, header) for rank, header in held if header.origin == origin]
        live = [rank for rank, header in alike if header.live]
        return (True, -live[0]) if live else (False, max(header.step for _, header in alike))

    def key(rank: int) -> tuple[tuple[bool, int], bool, tuple[TrainedView, int], int]:
        header = headers[rank]
        value = worth(header.origin) if header.epoch >= 0 else (False, -1)
        return value, header.lineage == lineage, header.standing, -rank

    return max(range(len(headers)), key=key)
