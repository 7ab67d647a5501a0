"""Keep-alive: a rank that computes for longer than the others' time limit is not lost.

An operation's time limit is meant for the network, and for ranks that hang. But an operation waits for the slowest
rank to come to it, and a slow machine may compute for minutes between two of them. So a rank that computes sends
notices, and each notice gives all operations that wait their whole time limit again: the limit begins when the
slowest rank comes.

    who sends     a rank whose caller shows that it computes (`Group.keep_alive`), four times within a time limit.
                  The first notice leaves when it has computed for a quarter of the limit without pause: ranks
                  that keep in step send none. The event loop sends it while the device is busy.
    to whom       to each rank that it has a link to. A rank that waits in an operation passes notices on, since
                  ranks further along the chain of those that wait may have no link to the sender. A notice has a
                  number, and is passed on once.
    what is left  a rank that is silent, or that no longer shows that it computes, is given up after one time
                  limit, as before. Whoever sends notices must therefore stop once its device hangs.

Links, too, are waited for longer: the higher rank of a pair calls when it comes to the operation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from hcsim.errors import HcsimError
from hcsim.runtime.channel import EMPTY
from hcsim.runtime.frame import Header, Kind
from hcsim.transport.link import Link
from hcsim.transport.mesh import Mesh

NOTICES = 4
"""The number of notices within a time limit."""


class ComputeNotices:
    """Sends, receives and passes on the notices of one mesh."""

    def __init__(self, mesh: Mesh, heard: Callable[[], bool]) -> None:
        """`heard` is called for each new notice, and returns whether an operation is in flight here."""
        self._mesh = mesh
        self._heard = heard
        self._sent = 0
        self._newest: dict[int, int] = {}
        """The number of the newest notice of each rank."""
        self._sending: dict[int, asyncio.Task[None]] = {}
        """By peer: a notice that waits behind other data makes later ones needless."""
        self._task: asyncio.Task[None] | None = None

    def keep_sending(self, computes: Callable[[], bool], timeout_s: float) -> None:
        """Send notices while `computes()`, until the group ends."""
        self.stop()
        self._task = self._mesh.host.spawn(self._run(computes, timeout_s / NOTICES), name="notices of computing")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self, computes: Callable[[], bool], every_s: float) -> None:
        us = self._mesh.us.rank
        while True:
            await self._mesh.host.clock.sleep(every_s)
            if computes():
                self._sent += 1
                self._send(us, self._sent)

    def received(self, link: Link, header: Header) -> None:
        """Take notice of a rank that computes, and pass the notice on if others may wait for us as we do for it."""
        rank, number, us = header.step - 1, header.operation, self._mesh.us
        if not 0 <= rank < us.world or rank == us.rank or number <= self._newest.get(rank, 0):
            return
        self._newest[rank] = number
        if self._heard():
            self._send(rank, number, but=link.peer_rank)

    def _send(self, rank: int, number: int, but: int | None = None) -> None:
        us = self._mesh.us
        header = Header(0, Kind.COMPUTING, us.rank, epoch=us.epoch, operation=number, step=rank + 1)
        for peer, link in self._mesh.links.items():
            if peer in (but, rank) or link.error is not None:
                continue
            before = self._sending.get(peer)
            if before is None or before.done():
                name = f"tell rank {peer} that rank {rank} computes"
                self._sending[peer] = self._mesh.host.spawn(_sent(link, header), name=name)


async def _sent(link: Link, header: Header) -> None:
    with suppress(HcsimError):  # whoever waits for that link finds out by itself
        await link.send(header, EMPTY)
