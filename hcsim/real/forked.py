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


_OURS: WeakSet[Closable] = WeakSet()


def own(what: Closable) -> None:
    """It is this process's alone; a process that is started by `exec` does not get it anyway."""
    _OURS.add(what)


def _let_go() -> None:
    for what in list(_OURS):
        what.close()


os.register_at_fork(after_in_child=_let_go)
