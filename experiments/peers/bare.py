"""The limit: a ring in a hundred lines of C over bare sockets, with no library around it.

Whatever sends tensors through TCP pays for these copies and additions; this does nothing else.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import numpy as np

from experiments.peers.peer import Floats, Job, Peer, Rank

_SOURCE = Path(__file__).with_name("bare.c")
_CONNECT_S = 30.0


class _BareRank:
    _values: Floats

    def __init__(self, library: ctypes.CDLL, previous: int, following: int, rank: int, ranks: int) -> None:
        self._library = library
        self._ring = previous, following
        self._place = rank, ranks

    def load(self, values: Floats) -> None:
        self._values = values

    async def all_reduce(self) -> None:
        self._reduce(self._values)

    async def barrier(self) -> None:
        self._reduce(np.zeros(self._place[1], np.float32))

    def read(self) -> Floats:
        return self._values

    def _reduce(self, values: Floats) -> None:
        address = values.ctypes.data_as(ctypes.c_void_p)
        error = self._library.all_reduce(*self._ring, address, ctypes.c_size_t(values.size), *self._place)
        if error:
            raise OSError(error, os.strerror(error))


def _missing() -> str | None:
    return None if shutil.which("cc") else "there is no C compiler (cc)"


def _compiled(job: Job, rank: int) -> ctypes.CDLL:
    library = Path(job.folder) / f"bare-{rank}.so"
    subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", library, _SOURCE], check=True)
    return ctypes.CDLL(str(library))


def _connected(address: tuple[str, int]) -> socket.socket:
    """As soon as it listens."""
    until_s = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)


@asynccontextmanager
async def _join(job: Job, rank: int) -> AsyncIterator[Rank]:
    library = _compiled(job, rank)
    here, there = (address.rpartition(":") for address in (job.addresses[rank], job.addresses[(rank + 1) % job.ranks]))
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((here[0], int(here[2]))))
        following = stack.enter_context(_connected((there[0], int(there[2]))))
        listener.settimeout(_CONNECT_S)
        previous = stack.enter_context(listener.accept()[0])
        for end in (previous, following):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setblocking(False)
        yield _BareRank(library, previous.fileno(), following.fileno(), rank, job.ranks)


BARE = Peer("bare", _missing, _join, ("float32",))
