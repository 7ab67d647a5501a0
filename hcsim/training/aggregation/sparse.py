"""Sparse compressors: everybody gets everybody's payload, decodes it and adds it up, in the order of ranks.

A rank whose tensors are not finite says so in their place, and all ranks refuse the sum once the exchange is over."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from hcsim.collectives.buffers import array_of
from hcsim.collectives.group import Group
from hcsim.collectives.plan import offsets
from hcsim.compressors.base import Array, Bytes, Compressor, Ident
from hcsim.compressors.encoding import has_values, without_values
from hcsim.errors import NotFinite
from hcsim.runtime.channel import Phantom
from hcsim.training.aggregation.bench import Bench, nothing
from hcsim.training.layout import Tensor


class SparseExchange:
    """Gathers payloads whose size follows from the shapes."""

    def __init__(self, group: Group, bench: Bench, compressor: Compressor) -> None:
        self._group = group
        self._bench = bench
        self._compressor = compressor

    async def total(self, flat: Array, tensors: Sequence[Tensor], step: int, bucket: int) -> None:
        """Replace each tensor by its sum over all ranks."""
        shapes = [tensor.shape for tensor in tensors]

        def encoded() -> Bytes:
            return np.concatenate([self._encoded(tensor, flat, step) for tensor in tensors])

        payload = await self._bench.encode(shapes, encoded)
        payloads = [array_of(theirs) for theirs in await self._group.all_gather(payload, bucket=bucket)]

        def summed() -> None:
            cuts = offsets([self._compressor.size_bytes(shape) for shape in shapes])
            for tensor, (lo, hi) in zip(tensors, pairwise(cuts), strict=True):
                place = tensor.view(flat)
                place.fill(0.0)
                for rank, theirs in enumerate(payloads):
                    if not has_values(theirs[lo:hi]):
                        raise NotFinite(f"the tensor of rank {rank} has a NaN or an infinity", tensor.name)
                    self._compressor.add(theirs[lo:hi], place, Ident(tensor.name, step))

        await self._bench.decode(shapes, summed, self._group.size)

    def _encoded(self, tensor: Tensor, flat: Array, step: int) -> Bytes:
        try:
            return self._compressor.encode(tensor.view(flat), Ident(tensor.name, step))
        except NotFinite:
            return without_values(self._compressor.size_bytes(tensor.shape))

    async def phantom_total(self, tensors: Sequence[Tensor], bucket: int) -> None:
        """The same without data: only time passes."""
        shapes = [tensor.shape for tensor in tensors]
        await self._bench.encode(shapes, nothing)
        await self._group.all_gather(Phantom(sum(map(self._compressor.size_bytes, shapes))), bucket=bucket)
        await self._bench.decode(shapes, nothing, self._group.size)
