"""Linear compressors: their factors are summed by an all-reduce, round by round.

The tensors of a bucket go through their rounds in lockstep, so a bucket costs as many all-reduces as its
compressor has rounds, whatever the number of its tensors.

A rank whose tensor is not finite sends NaNs in its place: then their sum is none on all ranks, which all refuse it once
the exchange is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from hcsim.collectives.group import Group
from hcsim.compressors.base import Array, Ident, Linear, Rounds
from hcsim.errors import NotFinite
from hcsim.runtime.channel import Phantom
from hcsim.training.aggregation.bench import Bench, nothing
from hcsim.training.layout import FLOAT_BYTES, Tensor


class LinearExchange:
    """Sums what the rounds of each tensor ask for."""

    def __init__(self, group: Group, bench: Bench, compressor: Linear, algorithm: str) -> None:
        self._group = group
        self._bench = bench
        self._compressor = compressor
        self._algorithm = algorithm

    async def total(self, flat: Array, tensors: Sequence[Tensor], step: int, bucket: int) -> None:
        """Replace each tensor by its sum over all ranks."""
        views = [tensor.view(flat) for tensor in tensors]
        idents = [Ident(tensor.name, step) for tensor in tensors]
        shapes = [tensor.shape for tensor in tensors]
        sizes = [self._compressor.round_bytes(shape) for shape in shapes]
        lockstep = _Lockstep([self._compressor.rounds(v, of) for v, of in zip(views, idents, strict=True)], sizes)
        rounds = self._rounds(tensors)
        joined = await self._bench.encode(shapes, partial(lockstep.next, None), 1 / rounds)
        for number in range(1, rounds + 1):
            await self._group.all_reduce(joined, algorithm=self._algorithm, bucket=bucket)
            advance = partial(lockstep.next, joined)
            if number < rounds:
                joined = await self._bench.encode(shapes, advance, 1 / rounds)
            else:
                await self._bench.decode(shapes, advance)
        if lockstep.refused is not None:
            raise lockstep.refused

    async def phantom_total(self, tensors: Sequence[Tensor], bucket: int) -> None:
        """The same without data: only time passes."""
        shapes = [tensor.shape for tensor in tensors]
        rounds = self._rounds(tensors)
        for number in range(rounds):
            await self._bench.encode(shapes, nothing, 1 / rounds)
            sizes = map(self._compressor.round_bytes, shapes)
            size_bytes = sum(each[number] for each in sizes if number < len(each))
            await self._group.all_reduce(Phantom(size_bytes, FLOAT_BYTES), algorithm=self._algorithm, bucket=bucket)
        await self._bench.decode(shapes, nothing)

    def _rounds(self, tensors: Sequence[Tensor]) -> int:
        return max(len(self._compressor.round_bytes(tensor.shape)) for tensor in tensors)


class _Lockstep:
    """Several tensors' rounds, advanced together; some may have fewer than others."""

    def __init__(self, rounds: Sequence[Rounds], sizes: Sequence[tuple[int, ...]]) -> None:
        self.refused: NotFinite | None = None
        """Why the sums have no meaning, if a tensor is not finite."""
        self._sizes = sizes
        self._running = dict(enumerate(rounds))
        self._lengths = dict.fromkeys(self._running, 0)
        self._done = 0
        """Rounds that all have begun."""

    def next(self, joined: Array | None) -> Array:
        """Give each tensor its part of the sums (None to begin); what they want summed next, joined."""
        factors: dict[int, Array] = {}
        offset = 0
        for number, rounds in list(self._running.items()):
            length = self._lengths[number]
            try:
                if joined is None:
                    factors[number] = next(rounds)
                else:
                    factors[number] = rounds.send(joined[offset : offset + length])
            except StopIteration:
                del self._running[number]
            except NotFinite as error:
                self.refused = self.refused or error
                self._running[number] = _without_values(self._sizes[number][self._done :])
                if (nothing_left := next(self._running[number], None)) is None:
                    del self._running[number]
                else:
                    factors[number] = nothing_left
            offset += length
        self._done += 1
        self._lengths = {number: len(factor) for number, factor in factors.items()}
        if len(factors) == 1:
            return next(iter(factors.values()))  # a bucket that travels as it is needs no copy
        return np.concatenate([*factors.values(), np.empty(0, np.float32)])


def _without_values(sizes: Sequence[int]) -> Rounds:
    """The rounds that are left for a tensor that is not finite."""
    for size_bytes in sizes:
        yield np.full(size_bytes // FLOAT_BYTES, np.nan, np.float32)
