"""Where the groups of a torch program live: behind this, in this process (`local`) or in a simulator (`scripts`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from hcsim.calls import GroupCall
from hcsim.collectives.buffers import Array

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class Place(msgspec.Struct, frozen=True):
    """Our place in a group that is about to be formed."""

    name: str
    """The same on all its ranks, and of no other group of the program."""
    rank: int
    size: int
    timeout_s: float
    parent: Line | None = None
    """The group of the whole program, if this is one of some of its ranks, and that one is of the same engine."""
    ranks: tuple[int, ...] = ()
    """Which ranks of the parent these are, in the order of this group."""


class Pending(Protocol):
    """A call on its way."""

    def done(self) -> bool:
        """Whether it is over, well or not; never waits."""

    def wait(self, timeout_s: float | None) -> int:
        """Wait for the end: what `perform` returned. Raises what it raised, or `DeadlineExceeded`."""

    def on_done(self, act: Callable[[], None]) -> None:
        """Have something done after the end, in a thread of the engine's choice, or at once if it is over."""


class Line(Protocol):
    """This process's side of one group."""

    rank: int
    size: int

    def start(self, call: GroupCall, arrays: Sequence[Array]) -> Pending:
        """Begin a call. The arrays are flat, and belong to the call until it is over.

        Ranks start collectives in one order. May be called from any thread."""

    def close(self) -> None:
        """Leave the group in an orderly way, after all that was started."""

    def abort(self) -> None:
        """Leave it at once; the others learn that we gave up."""


class Engine(Protocol):
    """Opens groups."""

    def open(self, place: Place, store: Store) -> Line:
        """Take our place. All ranks of the group call this; the store is where they find each other."""


_engine: Engine | None = None


def use_engine(engine: Engine) -> None:
    """Let the groups that are opened from now on live there."""
    global _engine
    _engine = engine


def chosen_engine() -> Engine | None:
    """What `use_engine` was given; otherwise groups live in this process, for real."""
    return _engine
