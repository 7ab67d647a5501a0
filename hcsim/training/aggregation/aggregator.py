"""The sum of all ranks' arrays, by the exchange that the compressor needs.

Ranks scale their arrays first (by their share of the samples), so the sum is the weighted average. Each bucket
has its own number on the wire, so several buckets may be in flight at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np

from hcsim.collectives.group import Group
from hcsim.compressors.base import Array, Compressor, LinearCompressor, PayloadKind
from hcsim.compressors.cast import Dense
from hcsim.errors import NotFinite
from hcsim.runtime.channel import Phantom
from hcsim.training.aggregation.exchange import Bench, LinearExchange, QuantisedExchange, SparseExchange
from hcsim.training.layout import Bucket, Tensor
from hcsim.training.learner import TimeAccounting
from hcsim.training.task import Flat


class Aggregator(Protocol):
    """Sums arrays over a group."""

    async def total(self, flat: Flat, bucket: Bucket, weight: float, step: int) -> None:
        """Replace the bucket's part of the array by the sum over all ranks, each scaled by its rank's weight.

        If a rank's array is not finite, all ranks raise `NotFinite` once the exchange is over."""


class Exchange(Protocol):
    """The exchange of one kind of payload."""

    async def total(self, flat: Array, tensors: Sequence[Tensor], step: int, bucket: int) -> None:
        """Replace each tensor by its sum over all ranks. The tensors cover the whole array."""

    async def phantom_total(self, tensors: Sequence[Tensor], bucket: int) -> None:
        """Do the same without data: only time passes."""


class OneLevel:
    """All ranks exchange with all, by any collective."""

    def __init__(self, group: Group, ledger: TimeAccounting, compressor: Compressor, algorithm: str = "auto") -> None:
        self._group = group
        self._joined = isinstance(compressor, Dense)
        self._exchange = _exchange(group, Bench(group.host, ledger, compressor), compressor, algorithm)

    async def total(self, flat: Flat, bucket: Bucket, weight: float, step: int) -> None:
        # What travels as it is need not be told apart by tensor: the bucket goes out without a copy.
        tensors = (Tensor("bucket", (bucket.hi - bucket.lo,), 0),) if self._joined else bucket.tensors
        await self._group.host.device.touch(2 * bucket.size_bytes)
        if isinstance(flat, Phantom):
            await self._exchange.phantom_total(tensors, bucket.number)
        else:
            part = flat[bucket.span]
            part *= np.float32(weight)
            await self._exchange.total(part, tensors, step, bucket.number)


class Hierarchical:
    """Ranks reduce within their group; one rank of each group exchanges compressed sums with the other groups and
    broadcasts the result."""

    def __init__(self, near: Group, far: Aggregator | None) -> None:
        self._near = near
        self._far = far
        """None on ranks that do not represent their group."""

    async def total(self, flat: Flat, bucket: Bucket, weight: float, step: int) -> None:
        part: Flat
        await self._near.host.device.touch(2 * bucket.size_bytes)
        if isinstance(flat, Phantom):
            part = Phantom(bucket.size_bytes, flat.itemsize)
        else:
            part = flat[bucket.span]
            part *= np.float32(weight)
        await self._near.reduce(part, bucket=bucket.number)
        refused: NotFinite | None = None
        if self._far is not None:
            try:
                await self._far.total(flat, bucket, 1.0, step)
            except NotFinite as error:
                assert not isinstance(part, Phantom)
                refused = error
                part.fill(np.nan)
        await self._near.broadcast(part, bucket=bucket.number)
        if refused is not None:
            raise refused
        if not isinstance(part, Phantom) and part.size and np.isnan(part[0]):
            raise NotFinite("the tensor of some rank has a NaN or an infinity, or the sum has", bucket.tensors[0].name)


def _exchange(group: Group, bench: Bench, compressor: Compressor, algorithm: str) -> Exchange:
    if compressor.kind is PayloadKind.LINEAR:
        return LinearExchange(group, bench, cast(LinearCompressor, compressor), algorithm)
    if compressor.kind is PayloadKind.SPARSE:
        return SparseExchange(group, bench, compressor)
    return QuantisedExchange(group, bench, compressor)
