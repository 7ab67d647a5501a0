"""A process of the same user that holds the local socket of one that has none (see `hcsim.real.shm.rendezvous`).

The names are Linux's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hcsim.real.host import RealHost
from hcsim.runtime.channel import Channel


@asynccontextmanager
async def met_by_a_squatter(
    host: RealHost, address: str, *, kind: str = "", timeout_s: float
) -> AsyncIterator[tuple[asyncio.Task[Channel], socket.socket]]:
    """The host dials the address, and somebody else opens the door: the attempt, and the squatter's end of it."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"\0hcsim-4-{kind}{address}")
        door.listen()
        door.setblocking(False)
        dialling = asyncio.create_task(host.connect(address, timeout_s=timeout_s))
        with (await asyncio.get_running_loop().sock_accept(door))[0] as guest:
            yield dialling, guest
