"""The interface to the groups of a program of torch or of MLX, which live in this process (`local`) or in a
simulator (`scripts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from hcsim.calls import GroupCall
from hcsim.collectives.buffers import Array


class RendezvousStore(Protocol):
    """The operations of torch's key-value store by which the ranks of a group find each other."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes:
        """Wait until the key has a value, and return it."""

    def add(self, key: str, amount: int, /) -> int: ...

    def delete_key(self, key: str, /) -> bool: ...


class GroupSpec(msgspec.Struct, frozen=True):
    """This process's membership of a group to be formed."""

    name: str
    """The same on all ranks of the group, and unique among the groups of the program."""
    rank: int
    size: int
    timeout_s: float
    parent: EngineGroup | None = None
    """The group of the whole program, if this group consists of some of its ranks and both have the same
    engine."""
    ranks: tuple[int, ...] = ()
    """The parent's ranks that form this group, in this group's order."""


class PendingCall(Protocol):
    """A call in flight."""

    def done(self) -> bool:
        """Return whether the call has ended, with or without an error; never blocks."""

    def wait(self, timeout_s: float | None) -> int:
        """Wait for the end and return the result of `perform`. Raise its error, or `DeadlineExceeded`."""

    def on_done(self, act: Callable[[], None]) -> None:
        """Run the callback after the end, in a thread of the engine's choice, or at once if the call has ended."""


class EngineGroup(Protocol):
    """This process's handle of one group."""

    rank: int
    size: int

    def start(self, call: GroupCall, arrays: Sequence[Array]) -> PendingCall:
        """Start a call. The arrays are flat; the call owns them until it ends.

        All ranks start collectives in the same order. Safe to call from any thread."""

    def close(self) -> None:
        """Leave the group gracefully, after all calls that were started."""

    def abort(self) -> None:
        """Leave the group at once; the other ranks are told that this rank gave up."""


class Engine(Protocol):
    """Opens groups."""

    def open(self, place: GroupSpec, store: RendezvousStore) -> EngineGroup:
        """Join the group. All ranks of the group call this; the store serves as the rendezvous."""


_engine: Engine | None = None


def use_engine(engine: Engine) -> None:
    """Open all later groups with this engine."""
    global _engine
    _engine = engine


def chosen_engine() -> Engine | None:
    """Return the engine given to `use_engine`; None: groups live in this process, on the real network."""
    return _engine


_store: RendezvousStore | None = None


def use_store(store: RendezvousStore) -> None:
    """Give the store of a program that hcsim has launched."""
    global _store
    _store = store


def given_store() -> RendezvousStore | None:
    return _store
