"""Quantised compressors: a reduce-scatter and an all-gather of encoded pieces.

The bucket is cut into one part per rank. Everybody sends each rank its part, encoded; the owner decodes and sums
in the order of ranks, encodes the sum, and everybody gathers the encoded sums. So every element is encoded
twice, travels as often as in the best dense all-reduce, and is summed as a float. A tensor that
lies across a cut is encoded in pieces, each with its own scale.

With error feedback both errors are kept: each rank keeps what its own encoding lost, and the owner of a
part keeps what the encoding of the sum lost. Sum of inputs = what was delivered + sum of residuals.
(Tang et al., "DoubleSqueeze", 2019, compress twice in the same way, at a server.)

A rank whose tensors are not finite says so to the owner of each part, which says so to all in place of its sum.
So all ranks know once the exchange is over, and refuse the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from hcsim.collectives.buffers import array_of
from hcsim.collectives.group import Group
from hcsim.collectives.plan import offsets, split
from hcsim.compressors.base import Array, Bytes, Compressor, Ident
from hcsim.compressors.encoding import HEADER_BYTES, has_values, without_values
from hcsim.compressors.feedback import Feedback
from hcsim.errors import CompressionError, NotFinite
from hcsim.runtime.channel import Phantom
from hcsim.training.aggregation.bench import Bench, nothing
from hcsim.training.layout import Tensor

_LENGTH_BYTES = 8

Decode: TypeAlias = Callable[[Bytes, Array, Ident], None]
"""Puts, adds or subtracts what a payload says."""


class QuantisedExchange:
    """Sums parts where they belong, and gathers the sums."""

    def __init__(self, group: Group, bench: Bench, compressor: Compressor) -> None:
        self._group = group
        self._feedback = compressor if isinstance(compressor, Feedback) else None
        self._coder = compressor.inner if isinstance(compressor, Feedback) else compressor
        self._first = bench
        """Where gradients are encoded, and what that lost is found."""
        self._bench = bench.of(self._coder)

    async def total(self, flat: Array, tensors: Sequence[Tensor], step: int, bucket: int) -> None:
        """Replace each tensor by its sum over all ranks; together they are all of the array."""
        group, bench = self._group, self._bench
        shapes = [tensor.shape for tensor in tensors]
        parts = self._parts(tensors)
        ours = parts[group.rank]
        payloads, lost = await self._first.encode(shapes, lambda: self._encode_parts(flat, tensors, parts, step))
        received = await self._received(payloads, ours, bucket)
        theirs = [array_of(p) for p in await group.all_to_all(payloads, received, bucket=bucket)]

        part_shapes = [piece.shape for piece in ours]
        complete = await bench.decode(part_shapes, lambda: self._sum(theirs, flat, ours, step), group.size)
        payload = await bench.encode(part_shapes, lambda: self._encode_sum(flat, ours, step, complete=complete))
        counts = await self._counts(payload, parts, bucket)
        sums = [array_of(p) for p in await group.all_gather(payload, counts, bucket=bucket)]
        await bench.decode(shapes, lambda: self._deliver(sums, flat, parts, lost, step))
        if self._feedback is not None and lost is not None:
            for tensor in tensors:
                self._feedback.keep(tensor.view(lost), Ident(tensor.name, step))

    async def phantom_total(self, tensors: Sequence[Tensor], bucket: int) -> None:
        """The same without data: only time passes."""
        group, bench = self._group, self._bench
        shapes = [tensor.shape for tensor in tensors]
        parts = self._parts(tensors)
        sizes = [sum(self._coder.size_bytes(piece.shape) for piece in part) for part in parts]
        ours = [piece.shape for piece in parts[group.rank]]
        await self._first.encode(shapes, nothing)
        received = [sizes[group.rank]] * group.size
        if not self._coder.sized:
            await group.all_gather(Phantom(_LENGTH_BYTES * group.size), bucket=bucket)
        await group.all_to_all([Phantom(size) for size in sizes], received, bucket=bucket)
        await bench.decode(ours, nothing, group.size)
        await bench.encode(ours, nothing)
        if not self._coder.sized:
            await group.all_gather(Phantom(_LENGTH_BYTES), bucket=bucket)
        await group.all_gather(Phantom(sizes[group.rank]), sizes, bucket=bucket)
        await bench.decode(shapes, nothing)

    def _parts(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """By rank, what it sums: pieces of tensors. A lossless coder needs no tensor's scale, and gets one piece."""
        lo, hi = tensors[0].offset, tensors[-1].span.stop
        whole = [Tensor(tensors[0].name, (hi - lo,), lo)] if not self._coder.sized else tensors
        cuts = [lo + cut for cut in split(hi - lo, self._group.size)]
        return [[t.piece(*cut) for t in whole if t.offset < cut[1] and cut[0] < t.span.stop] for cut in pairwise(cuts)]

    def _encode_parts(
        self, flat: Array, tensors: Sequence[Tensor], parts: list[list[Tensor]], step: int
    ) -> tuple[list[Bytes], Array | None]:
        """A payload for each rank, and what is lost by them if that is to be kept."""
        if self._feedback is None:
            try:
                return [self._encode(flat, part, step) for part in parts], None
            except NotFinite:
                return [self._without_values(part) for part in parts], None
        for tensor in tensors:
            view = tensor.view(flat)
            view[...] = self._feedback.compensated(view, Ident(tensor.name, step))
        try:
            payloads = [self._encode(flat, part, step) for part in parts]
        except NotFinite:
            return [self._without_values(part) for part in parts], None
        lost = flat.copy()
        for part, payload in zip(parts, payloads, strict=True):
            self._decode(payload, lost, part, step, self._coder.subtract)
        return payloads, lost

    def _sum(self, payloads: list[Bytes], flat: Array, ours: list[Tensor], step: int) -> bool:
        """Sum our part; whether it is finite on all ranks."""
        if ours and not all(has_values(payload) for payload in payloads):
            return False
        for piece in ours:
            piece.view(flat).fill(0.0)
        for payload in payloads:
            self._decode(payload, flat, ours, step, self._coder.add)
        return True

    def _encode_sum(self, flat: Array, ours: list[Tensor], step: int, *, complete: bool) -> Bytes:
        try:
            return self._encode(flat, ours, step, " of all") if complete else self._without_values(ours)
        except NotFinite:
            return self._without_values(ours)

    def _without_values(self, pieces: Sequence[Tensor]) -> Bytes:
        sizes = [self._coder.size_bytes(p.shape) if self._coder.sized else HEADER_BYTES for p in pieces]
        return np.concatenate([*map(without_values, sizes), np.empty(0, np.uint8)])

    def _deliver(
        self, sums: list[Bytes], flat: Array, parts: list[list[Tensor]], lost: Array | None, step: int
    ) -> None:
        """Decode the sums, our own too: all ranks must hold the same. What our encoding of it lost is ours to keep."""
        for part, payload in zip(parts, sums, strict=True):
            if part and not has_values(payload):
                raise NotFinite("the tensor of some rank has a NaN or an infinity, or the sum has", part[0].name)
        ours = parts[self._group.rank]
        if lost is not None:
            for piece in ours:
                lost[piece.span] += flat[piece.span]
        for part, payload in zip(parts, sums, strict=True):
            self._decode(payload, flat, part, step, self._coder.decode)
        if lost is not None:
            for piece in ours:
                lost[piece.span] -= flat[piece.span]

    def _encode(self, flat: Array, pieces: Sequence[Tensor], step: int, of: str = "") -> Bytes:
        # The sum has a name of its own: a coder that rounds at random must not draw the same numbers for it again.
        encoded = [self._coder.encode(piece.view(flat), Ident(piece.name + of, step)) for piece in pieces]
        return np.concatenate([*encoded, np.empty(0, np.uint8)])

    def _decode(self, payload: Bytes, flat: Array, pieces: Sequence[Tensor], step: int, decode: Decode) -> None:
        sizes = [self._coder.size_bytes(p.shape) if self._coder.sized else payload.size for p in pieces]
        for piece, (lo, hi) in zip(pieces, pairwise(offsets(sizes)), strict=True):
            decode(payload[lo:hi], piece.view(flat), Ident(piece.name, step))

    async def _received(self, payloads: list[Bytes], ours: list[Tensor], bucket: int) -> list[int]:
        """How much each rank sends us: as much as we send ourselves, or what they say."""
        rank, size = self._group.rank, self._group.size
        if self._coder.sized:
            return [payloads[rank].size] * size
        lengths = await self._group.all_gather(np.array([p.size for p in payloads]), bucket=bucket)
        return self._believed([int(theirs[rank]) for theirs in map(array_of, lengths)], [ours] * size)

    async def _counts(self, payload: Bytes, parts: list[list[Tensor]], bucket: int) -> list[int]:
        """How long each rank's encoded sum is."""
        if self._coder.sized:
            return [sum(self._coder.size_bytes(piece.shape) for piece in part) for part in parts]
        lengths = await self._group.all_gather(np.array([payload.size]), bucket=bucket)
        return self._believed([int(theirs[0]) for theirs in map(array_of, lengths)], parts)

    def _believed(self, lengths: list[int], parts: list[list[Tensor]]) -> list[int]:
        """What ranks say of their payloads' lengths, if that is possible: we are about to take so much memory."""
        for rank, (length, part) in enumerate(zip(lengths, parts, strict=True)):
            most = sum(self._coder.most_bytes(piece.shape) for piece in part)
            if not 0 <= length <= most:
                name = part[0].name if part else "nothing"
                raise CompressionError(f"rank {rank} announces {length} bytes, where {most} would be the most", name)
        return lengths
