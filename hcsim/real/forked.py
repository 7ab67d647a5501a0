"""What a forked child has to let go of: sockets of its parent, whose other ends wait for the end of the parent, and
memory that the parent shares with others."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Closable(Protocol):
    """A socket, or the like."""

    def close(self) -> object:
        """Only here: a parent's copy stays open."""


_LISTENING: WeakSet[Closable] = WeakSet()
_OTHERS: WeakSet[Closable] = WeakSet()


def own(what: Closable, *, listens: bool = False) -> None:
    """It is this process's alone; a process that is started by `exec` does not get it anyway."""
    (_LISTENING if listens else _OTHERS).add(what)


def _let_go() -> None:
    # Listeners first: who sees a channel end, and calls again, must not be taken in for a parent that was killed.
    for what in (*_LISTENING, *_OTHERS):
        what.close()


os.register_at_fork(after_in_child=_let_go)
