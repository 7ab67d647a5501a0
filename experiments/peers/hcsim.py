"""hcsim itself, on the standard event loop: as it is within one machine, and over TCP as between machines.

Both in plaintext and with TLS, which within one machine proves who is there and encrypts nothing."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import hcsim
from experiments.peers.peer import Floats, Job, Peer, Rank
from hcsim.identity.keys import ClusterSecret, NodeKey
from hcsim.real.tls import ClusterTls


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


def _tls(job: Job, rank: int) -> ClusterTls:
    """Of a secret that only this team's ranks make, as long as nobody reads their folder's name: good enough here."""
    secret = hashlib.sha256(job.folder.encode()).digest()
    return ClusterTls(NodeKey(hashlib.sha256(secret + bytes([rank])).digest()), ClusterSecret(secret[:16]))


@asynccontextmanager
async def _join(job: Job, rank: int) -> AsyncIterator[Rank]:
    tls = _tls(job, rank) if job.peer in (HCSIM_TLS.name, HCSIM_TLS_TCP.name) else None
    shared = job.peer in (HCSIM.name, HCSIM_TLS.name)
    async with hcsim.real_group(rank=rank, peers=list(job.addresses), tls=tls, shared_memory=shared) as group:
        if job.algorithm == "auto":
            await group.measure()
        yield _HcsimRank(group, job.algorithm)


HCSIM = Peer("hcsim", _missing, _join)
HCSIM_TCP = Peer("hcsim_tcp", _missing, _join)
HCSIM_TLS = Peer("hcsim_tls", _missing, _join)
HCSIM_TLS_TCP = Peer("hcsim_tls_tcp", _missing, _join)
