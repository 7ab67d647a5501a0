"""Sums of encoded tensors over all ranks, by a collective that fits the kind of compressor.

Linear compressors: an all-reduce sums their factors, round by round. The tensors of a bucket go through their
rounds in lockstep, so a bucket costs as many all-reduces as its compressor has rounds, whatever the number of
tensors.

Sparse compressors: an all-gather. Each rank decodes all payloads and adds them up in the order of ranks.

Quantised compressors: a reduce-scatter and an all-gather of encoded pieces. The bucket is cut into one part per
rank. Each rank sends every other rank its part, encoded. The owner of a part decodes and sums in the order of
ranks and encodes the sum; all ranks gather the encoded sums. So every element is encoded twice, travels as
often as in the best dense all-reduce, and is summed as a float. A tensor that lies across a cut is encoded in
pieces, each with its own scale. With error feedback both errors are kept: each rank keeps the error of its own
encoding, and the owner of a part keeps the error of the encoded sum. Sum of inputs = what was delivered + sum
of residuals. (Tang et al., "DoubleSqueeze", 2019, compress twice in the same way, at a server.)

A rank whose tensors are not finite sends NaNs or a mark in their place, and the owner of a part passes them on
in place of its sum. So all ranks know once the exchange is over, and all reject the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Protocol, TypeAlias, TypeVar, cast

import numpy as np

from hcsim.collectives.buffers import array_of
from hcsim.collectives.group import Group
from hcsim.collectives.plan import offsets, split
from hcsim.compressors.base import (
    Array,
    ByteArray,
    Compressor,
    Ident,
    LinearCompressor,
    PayloadKind,
    ReductionRounds,
    TensorShape,
)
from hcsim.compressors.cast import Dense
from hcsim.compressors.encoding import HEADER_BYTES, has_values, without_values
from hcsim.compressors.feedback import ErrorFeedback
from hcsim.errors import CompressionError, NotFinite
from hcsim.runtime.channel import Phantom
from hcsim.runtime.host import Host, Work, joined_work
from hcsim.training.layout import FLOAT_BYTES, Bucket, Tensor
from hcsim.training.learner import TimeAccounting
from hcsim.training.task import Flat

T = TypeVar("T")


class Bench:
    """Runs a compressor's work on a host's device and books the time."""

    def __init__(self, host: Host, ledger: TimeAccounting, compressor: Compressor) -> None:
        self._host = host
        self._ledger = ledger
        self._compressor = compressor

    def of(self, compressor: Compressor) -> Bench:
        return Bench(self._host, self._ledger, compressor)

    async def encode(self, shapes: Iterable[TensorShape], function: Callable[[], T], share: float = 1.0) -> T:
        """Call a function that encodes tensors of these shapes; `share` is the part of the work done now."""
        tensors = list(shapes)
        metrics, compressor = self._host.metrics, self._compressor.spec
        began_s = self._host.clock.elapsed()
        result = await self._run("encode", map(self._compressor.encode_work, tensors), function, share)
        lasted_s = self._host.clock.elapsed() - began_s
        metrics.histogram("hcsim_compression_encode_seconds", compressor=compressor).observe(lasted_s)
        before = share * sum(FLOAT_BYTES * prod(shape) for shape in tensors)
        expected = share * sum(map(self._compressor.size_bytes, tensors))
        after = _encoded_bytes(result, expected)
        metrics.counter("hcsim_compression_input_bytes_total", compressor=compressor).add(before)
        metrics.counter("hcsim_compression_output_bytes_total", compressor=compressor).add(after)
        if after:
            metrics.gauge("hcsim_compression_ratio", compressor=compressor).set(before / after)
        return result

    async def decode(self, shapes: Iterable[TensorShape], function: Callable[[], T], times: float = 1.0) -> T:
        """Call a function that decodes tensors of these shapes, `times` times each."""
        began_s = self._host.clock.elapsed()
        result = await self._run("decode", map(self._compressor.decode_work, shapes), function, times)
        seconds = self._host.metrics.histogram("hcsim_compression_decode_seconds", compressor=self._compressor.spec)
        seconds.observe(self._host.clock.elapsed() - began_s)
        return result

    async def _run(self, name: str, works: Iterable[Work], function: Callable[[], T], times: float) -> T:
        total = joined_work(works, times)
        if not total.flops and not total.moved_bytes:
            return function()
        with self._ledger.spent_on("encode", name, total):
            return await self._host.device.run(total, function)


def _encoded_bytes(result: object, expected: float) -> float:
    """Return the size of one payload, or of one payload per rank (which a residual may accompany). The size of a
    phantom is the expected one."""
    if isinstance(result, tuple):
        return float(sum(payload.nbytes for payload in result[0]))
    return result.nbytes if isinstance(result, np.ndarray) else expected


def nothing() -> None:
    """Do nothing: for a phantom only time passes."""


class LinearExchange:
    """Sums the arrays that the rounds of each tensor request."""

    def __init__(self, group: Group, bench: Bench, compressor: LinearCompressor, algorithm: str) -> None:
        self._group = group
        self._bench = bench
        self._compressor = compressor
        self._algorithm = algorithm

    async def total(self, flat: Array, tensors: Sequence[Tensor], step: int, bucket: int) -> None:
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
        shapes = [tensor.shape for tensor in tensors]
        rounds = self._rounds(tensors)
        width = self._compressor.element_bytes if isinstance(self._compressor, Dense) else FLOAT_BYTES
        for number in range(rounds):
            await self._bench.encode(shapes, nothing, 1 / rounds)
            sizes = map(self._compressor.round_bytes, shapes)
            size_bytes = sum(each[number] for each in sizes if number < len(each))
            await self._group.all_reduce(Phantom(size_bytes, width), algorithm=self._algorithm, bucket=bucket)
        await self._bench.decode(shapes, nothing)

    def _rounds(self, tensors: Sequence[Tensor]) -> int:
        return max(len(self._compressor.round_bytes(tensor.shape)) for tensor in tensors)


class _Lockstep:
    """The rounds of several tensors, advanced together; some tensors may have fewer rounds than others."""

    def __init__(self, rounds: Sequence[ReductionRounds], sizes: Sequence[tuple[int, ...]]) -> None:
        self.refused: NotFinite | None = None
        """The error, if a tensor is not finite and the sums are meaningless."""
        self._sizes = sizes
        self._running = dict(enumerate(rounds))
        self._lengths = dict.fromkeys(self._running, 0)
        self._done = 0
        """The number of rounds that all tensors have begun."""

    def next(self, joined: Array | None) -> Array:
        """Give each tensor its part of the sums (None to begin); return the next arrays to sum, joined."""
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


def _without_values(sizes: Sequence[int]) -> ReductionRounds:
    """Return the remaining rounds of a tensor that is not finite."""
    for size_bytes in sizes:
        yield np.full(size_bytes // FLOAT_BYTES, np.nan, np.float32)


class SparseExchange:
    """Gathers payloads whose size follows from the shapes."""

    def __init__(self, group: Group, bench: Bench, compressor: Compressor) -> None:
        self._group = group
        self._bench = bench
        self._compressor = compressor

    async def total(self, flat: Array, tensors: Sequence[Tensor], step: int, bucket: int) -> None:
        shapes = [tensor.shape for tensor in tensors]

        def encoded() -> ByteArray:
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

    def _encoded(self, tensor: Tensor, flat: Array, step: int) -> ByteArray:
        try:
            return self._compressor.encode(tensor.view(flat), Ident(tensor.name, step))
        except NotFinite:
            return without_values(self._compressor.size_bytes(tensor.shape))

    async def phantom_total(self, tensors: Sequence[Tensor], bucket: int) -> None:
        shapes = [tensor.shape for tensor in tensors]
        await self._bench.encode(shapes, nothing)
        await self._group.all_gather(Phantom(sum(map(self._compressor.size_bytes, shapes))), bucket=bucket)
        await self._bench.decode(shapes, nothing, self._group.size)


_LENGTH_BYTES = 8

Decode: TypeAlias = Callable[[ByteArray, Array, Ident], None]
"""Puts, adds or subtracts the content of a payload."""


class QuantisedExchange:
    """Each rank sums one part; the ranks gather the sums."""

    def __init__(self, group: Group, bench: Bench, compressor: Compressor) -> None:
        self._group = group
        self._feedback = compressor if isinstance(compressor, ErrorFeedback) else None
        self._coder = compressor.inner if isinstance(compressor, ErrorFeedback) else compressor
        self._first = bench
        """Encodes gradients and computes their residual."""
        self._bench = bench.of(self._coder)

    async def total(self, flat: Array, tensors: Sequence[Tensor], step: int, bucket: int) -> None:
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
        """Return by rank the pieces of tensors that it sums. A lossless coder needs no scale per tensor and gets one
        piece."""
        lo, hi = tensors[0].offset, tensors[-1].span.stop
        whole = [Tensor(tensors[0].name, (hi - lo,), lo)] if not self._coder.sized else tensors
        cuts = [lo + cut for cut in split(hi - lo, self._group.size)]
        return [[t.piece(*cut) for t in whole if t.offset < cut[1] and cut[0] < t.span.stop] for cut in pairwise(cuts)]

    def _encode_parts(
        self, flat: Array, tensors: Sequence[Tensor], parts: list[list[Tensor]], step: int
    ) -> tuple[list[ByteArray], Array | None]:
        """Return one payload per rank, and their residual if it is to be kept."""
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

    def _sum(self, payloads: list[ByteArray], flat: Array, ours: list[Tensor], step: int) -> bool:
        """Sum this rank's part; return whether it is finite on all ranks."""
        if ours and not all(has_values(payload) for payload in payloads):
            return False
        for piece in ours:
            piece.view(flat).fill(0.0)
        for payload in payloads:
            self._decode(payload, flat, ours, step, self._coder.add)
        return True

    def _encode_sum(self, flat: Array, ours: list[Tensor], step: int, *, complete: bool) -> ByteArray:
        try:
            return self._encode(flat, ours, step, " of all") if complete else self._without_values(ours)
        except NotFinite:
            return self._without_values(ours)

    def _without_values(self, pieces: Sequence[Tensor]) -> ByteArray:
        sizes = [self._coder.size_bytes(p.shape) if self._coder.sized else HEADER_BYTES for p in pieces]
        return np.concatenate([*map(without_values, sizes), np.empty(0, np.uint8)])

    def _deliver(
        self, sums: list[ByteArray], flat: Array, parts: list[list[Tensor]], lost: Array | None, step: int
    ) -> None:
        """Decode the sums, this rank's own included: all ranks must hold the same values. The owner keeps the
        residual of its encoded sum."""
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

    def _encode(self, flat: Array, pieces: Sequence[Tensor], step: int, of: str = "") -> ByteArray:
        # The sum has a name of its own: a coder that rounds at random must not draw the same numbers for it again.
        encoded = [self._coder.encode(piece.view(flat), Ident(piece.name + of, step)) for piece in pieces]
        return np.concatenate([*encoded, np.empty(0, np.uint8)])

    def _decode(self, payload: ByteArray, flat: Array, pieces: Sequence[Tensor], step: int, decode: Decode) -> None:
        sizes = [self._coder.size_bytes(p.shape) if self._coder.sized else payload.size for p in pieces]
        for piece, (lo, hi) in zip(pieces, pairwise(offsets(sizes)), strict=True):
            decode(payload[lo:hi], piece.view(flat), Ident(piece.name, step))

    async def _received(self, payloads: list[ByteArray], ours: list[Tensor], bucket: int) -> list[int]:
        """Return the number of bytes that each rank sends: as many as this rank sends itself, or the announced
        lengths."""
        rank, size = self._group.rank, self._group.size
        if self._coder.sized:
            return [payloads[rank].size] * size
        lengths = await self._group.all_gather(np.array([p.size for p in payloads]), bucket=bucket)
        return self._believed([int(theirs[rank]) for theirs in map(array_of, lengths)], [ours] * size)

    async def _counts(self, payload: ByteArray, parts: list[list[Tensor]], bucket: int) -> list[int]:
        if self._coder.sized:
            return [sum(self._coder.size_bytes(piece.shape) for piece in part) for part in parts]
        lengths = await self._group.all_gather(np.array([payload.size]), bucket=bucket)
        return self._believed([int(theirs[0]) for theirs in map(array_of, lengths)], parts)

    def _believed(self, lengths: list[int], parts: list[list[Tensor]]) -> list[int]:
        """Check the announced payload lengths: memory of that size is about to be allocated."""
        for rank, (length, part) in enumerate(zip(lengths, parts, strict=True)):
            most = sum(self._coder.most_bytes(piece.shape) for piece in part)
            if not 0 <= length <= most:
                name = part[0].name if part else "nothing"
                raise CompressionError(f"rank {rank} announces {length} bytes, where {most} would be the most", name)
        return lengths


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
