"""hcsim itself: a group over real TCP, on the standard event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import hcsim
from experiments.peers.peer import Floats, Job, Peer, Rank


class _HcsimRank:
    _values: Floats

    def __init__(self, group: hcsim.Group, algorithm: str) -> None:
        self._group = group
        self._algorithm = algorithm

    def load(self, values: Floats) -> None:
        self._values = values

    async def all_reduce(self) -> None:
        await self._group.all_reduce(self._values, algorithm=self._algorithm)

    async def barrier(self) -> None:
        await self._group.barrier()

    def read(self) -> Floats:
        return self._values


def _missing() -> None:
    """Never: we come with it."""


@asynccontextmanager
async def _join(job: Job, rank: int) -> AsyncIterator[Rank]:
    async with hcsim.real_group(rank=rank, peers=list(job.addresses)) as group:
        if job.algorithm == "auto":
            await group.measure()
        yield _HcsimRank(group, job.algorithm)


HCSIM = Peer("hcsim", _missing, _join)
