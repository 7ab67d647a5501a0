"""What a forked child has to let go of: sockets of its parent, whose other ends wait for the end of the parent."""

from __future__ import annotations

import os
import socket
from weakref import WeakSet

_OURS: WeakSet[socket.socket] = WeakSet()


def own(sock: socket.socket) -> None:
    """The socket is this process's alone; one that is started by `exec` does not get it anyway."""
    _OURS.add(sock)


def _let_go() -> None:
    for sock in list(_OURS):
        sock.close()


os.register_at_fork(after_in_child=_let_go)
